"""BlockPool: a model with sets, any sequence of operations."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.blocks import ROOT, BlockPool, chain_digest


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and give back blocks; nothing is lost or handed out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.held: list[list[int]] = []
        self.published: dict[bytes, int] = {}

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        ids = self.pool.take(count)
        live = {b for h in self.held for b in h}
        assert len(set(ids)) == count
        assert not set(ids) & live
        self.published = {d: b for d, b in self.published.items() if b not in ids}
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), token=st.integers(0, 5))
    def publish(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from([h for h in self.held if h]))
        digest = chain_digest(ROOT, [token])
        block = holder[0]
        if digest in self.published or block in self.published.values():
            return
        self.pool.publish(block, digest)
        self.published[digest] = block

    @rule(token=st.integers(0, 5))
    def find_and_share(self, token: int) -> None:
        digest = chain_digest(ROOT, [token])
        found = self.pool.find([digest])
        assert found == ([self.published[digest]] if digest in self.published else [])
        self.pool.share(found)
        self.held.append(found)

    @invariant()
    def free_plus_held_is_all(self) -> None:
        live = {b for h in self.held for b in h}
        assert self.pool.num_free + len(live) == 7


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_digest_names_the_whole_prefix() -> None:
    a = chain_digest(chain_digest(ROOT, [1, 2]), [3, 4])
    assert a == chain_digest(chain_digest(ROOT, [1, 2]), [3, 4])
    assert a != chain_digest(chain_digest(ROOT, [1, 9]), [3, 4])
    assert chain_digest(ROOT, [1, 2]) != chain_digest(ROOT, [258])


def test_content_survives_until_the_block_is_needed() -> None:
    pool = BlockPool(2)
    ids = pool.take(1)
    pool.publish(ids[0], b"x")
    pool.give_back(ids)
    assert pool.find([b"x"]) == ids
    pool.take(1)
    assert pool.find([b"x"]) == ids
    pool.take(1)
    assert pool.find([b"x"]) == []
