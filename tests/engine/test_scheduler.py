"""Rows, KV blocks and prompt tokens by the rank that holds a request: row n is rank n % N's."""

from engine.kv.blocks import BlockPool
from engine.request import Request, SamplingParams
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence

SIZE = 3


def scheduler(blocks: int = 10, rows: int = 8, budget: int = 30) -> Scheduler:
    pools = tuple(BlockPool(blocks) for _ in range(SIZE))
    return Scheduler(pools, 4, rows, budget, 2, prefix_caching=False)


def sequence(name: str, tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=8)
    return Sequence(Request(request_id=name, prompt_token_ids=(5,) * tokens, params=params))


def done(made: Scheduler, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        made.advance(chunk.sequence, chunk.start + chunk.count)


def test_newcomers_go_where_the_fewest_are() -> None:
    made = scheduler()
    many = [sequence(str(i), 1) for i in range(8)]
    for each in many:
        made.add(each)
    done(made, made.prefill())
    assert [s.row % SIZE for s in many] == [0, 1, 2, 0, 1, 2, 0, 1]
    for i in (1, 4, 5):
        made.retire(many[i])
    later = [sequence(str(i), 1) for i in range(8, 11)]
    for each in later:
        made.add(each)
    done(made, made.prefill())
    assert [s.row % SIZE for s in later] == [1, 2, 1]
    assert {s.row for s in made.running} == set(range(8)), "no row is given twice"


def test_each_rank_computes_an_equal_part_of_a_prefill() -> None:
    """A long prompt does not keep the others' ranks waiting, nor do they compute more for it."""
    made = scheduler(blocks=20, budget=28)
    many = [sequence("a", 25), sequence("b", 4), sequence("c", 13), sequence("d", 9)]
    for each in many:
        made.add(each)
    chunks = made.prefill()
    assert [(c.sequence.row % SIZE, c.count) for c in chunks] == [(0, 10), (1, 4), (2, 10), (1, 6)]
    done(made, chunks)
    chunks = made.prefill()
    assert [(c.sequence.row % SIZE, c.count) for c in chunks] == [(0, 10), (2, 3), (1, 3)]


def test_blocks_are_the_holders_and_the_youngest_of_them_gives_way() -> None:
    made = scheduler(blocks=4)
    many = [sequence(str(i), 4) for i in range(5)]  # two blocks each, of four of their rank's
    for each in many:
        made.add(each)
    done(made, made.prefill())
    assert [pool.num_free for pool in made.pools] == [0, 0, 2]
    many[0].token_ids += [6] * 4
    made.advance(many[0], 7)
    assert [s.request.request_id for s in made.decoding()] == ["0", "1", "2", "4"]
    assert many[3].row < 0, "the other one of rank 0; 4 is younger, but its blocks are no help"
    assert [pool.num_free for pool in made.pools] == [1, 0, 2]
    assert list(made.waiting) == [many[3]]
    # rank 0 has no room for it; rank 2 has
    chunks = made.prefill()
    assert [(c.sequence.request.request_id, c.sequence.row % SIZE) for c in chunks] == [("3", 2)]
    made.preempt_all()
    assert made.num_free_blocks == SIZE * 4


def test_newcomers_start_together() -> None:
    """Few of them wait for more, unless a long prompt fills a step, nobody is kept, or all is."""
    pools = (BlockPool(1000),)
    made = Scheduler(pools, 4, 64, 8192, 2, prefix_caching=False)
    many = [sequence(str(i), 3) for i in range(64)]
    for each in many:
        made.add(each)
    made.together = 4
    done(made, made.prefill())
    assert len(made.running) == 64, "nothing runs: nobody waits"
    for i in range(3):
        made.retire(many[i])
        made.add(sequence(f"new {i}", 3))
    assert not made.prefill()
    made.retire(many[3])
    made.add(sequence("new 3", 3))
    chunks = made.prefill()
    assert len(chunks) == 4
    done(made, chunks)
    made.retire(many[4])
    made.add(sequence("long", 1024))
    done(made, made.prefill())
    assert len(made.running) == 64
    made.retire(many[5])
    made.add(sequence("last", 3))
    made.together = 0
    assert len(made.prefill()) == 1, "no more to come"


def test_who_is_there_soon_has_rows_blocks_and_a_short_prompt() -> None:
    made = scheduler(blocks=20, budget=28)
    assert made.soon == 0
    for i in range(5):
        made.add(sequence(str(i), 4))  # two blocks each
    assert made.soon == 5
    done(made, made.prefill())
    assert made.soon == len(made.running) == 5
    for i in range(9):
        made.add(sequence(f"more {i}", 4))
    assert made.soon == made.max_num_seqs, "rows"
    few = scheduler(blocks=2)
    for i in range(5):
        few.add(sequence(str(i), 4))
    assert few.soon == SIZE * 2 // 2, "blocks"
    late = scheduler(blocks=400, budget=3)
    for i in range(5):
        late.add(sequence(str(i), 12))
    assert late.soon == 2, "eight steps of three tokens are two prompts"
