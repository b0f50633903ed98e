"""Parts of networks: together they are the whole, and compute what it computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.config import LayersSpec
from engine.models.layers import Placement
from engine.models.loader import Checkpoint
from engine.models.shapes import RandomWeights, target_shape
from engine.models.shard import Share, check_heads
from engine.models.target_config import parse_target
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.distributed import Ranks, run_ranks
from tests.helpers.engines import make_engine, prompts

SPEC = target_shape("shape:qwen3-8b").layers


def heads(num_heads: int, num_kv_heads: int) -> LayersSpec:
    return replace(SPEC, num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_even_parts_cover_everything_once_and_end_in_zeros(size: int) -> None:
    whole = torch.arange(1.0, 23.0).view(11, 2)
    parts = [Share(rank, size).even(11, dim=0) for rank in range(size)]
    cut = [part.cut(whole) for part in parts if part is not None]
    assert {len(c) for c in cut} == {-(-11 // size)}, "equal shapes"
    joined = torch.cat(cut)
    assert torch.equal(joined[:11], whole)
    assert not joined[11:].any()


@pytest.mark.parametrize(("num_heads", "kv", "size"), [(8, 4, 2), (8, 4, 8), (9, 3, 9), (12, 1, 6)])
def test_query_heads_of_a_rank_use_the_kv_heads_it_holds(
    num_heads: int, kv: int, size: int
) -> None:
    spec = heads(num_heads, kv)
    d, held = spec.head_dim, []
    for rank in range(size):
        share = Share(rank, size)
        q, k = share.heads(spec, "q", dim=0), share.heads(spec, "k", dim=0)
        assert q is not None
        assert k is not None
        local = share.layers(spec)
        assert (q.width, k.width) == (local.num_heads * d, local.num_kv_heads * d)
        for i in range(local.num_heads):
            head = q.start // d + i
            mine = i // (local.num_heads // local.num_kv_heads)
            assert k.start // d + mine == head // (num_heads // kv)
            held.append(head)
    assert held == list(range(num_heads))


def test_heads_that_cannot_be_dealt_are_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match="9 heads and 3 KV heads") as info:
        check_heads(heads(9, 3), 2, "the target")
    assert info.value.hint == "use -tp 1, 3 or 9"
    with pytest.raises(ConfigError, match="12 heads and 2 KV heads"):
        check_heads(heads(12, 2), 3, "the target")  # the query heads of rank 1 need both KV heads
    check_heads(heads(12, 2), 4, "the target")


def test_random_weights_are_the_same_matrix_at_any_number_of_ranks() -> None:
    """They came from one stream, so that what was asked for before changed them."""

    def take(share: Share, dim: int) -> torch.Tensor:
        return RandomWeights(3).take(
            "layers.0.mlp.up_proj.weight",
            (10, 6),
            dtype=torch.float32,
            device=torch.device("cpu"),
            part=share.even((10, 6)[dim], dim),
        )

    whole = take(Share(), 0)
    for size in (2, 5):
        for dim in (0, 1):
            parts = [take(Share(rank, size), dim) for rank in range(size)]
            assert torch.equal(torch.cat(parts, dim=dim)[:10, :6], whole)
    other = RandomWeights(3)
    other.take("a", (4, 4), dtype=torch.float32, device=torch.device("cpu"))
    again = other.take(
        "layers.0.mlp.up_proj.weight", (10, 6), dtype=torch.float32, device=torch.device("cpu")
    )
    assert torch.equal(again, whole)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2, 12 heads, 2 KV heads": {
        "architecture": "Qwen2ForCausalLM",
        "num_heads": 12,
        "hidden_size": 96,
        "tied": True,
    },
    "qwen3, one KV head": {
        "architecture": "Qwen3ForCausalLM",
        "num_heads": 12,
        "num_kv_heads": 1,
        "vocab_size": 131,
        "intermediate_size": 50,
    },
}


def same_states(ranks: Ranks, folder: Path, draft: Path, want: dict[str, torch.Tensor]) -> None:
    group = ranks.group()
    engine = make_engine(folder, draft, group=group)
    if ranks.rank:
        engine.mirror()
        return
    for i, prompt in enumerate(prompts(3, seed=5)):
        top = engine.top_logits(prompt, 5)
        assert [t for t, _ in top] == want[str(i)][:, 0].long().tolist()
        torch.testing.assert_close(torch.tensor([x for _, x in top]), want[str(i)][:, 1].float())
    held = engine.runner.net.target.embedding.weight
    assert len(held) == -(-engine.runner.net.target.spec.vocab_size // ranks.size)
    engine.close()


@pytest.mark.parametrize(("family", "size"), list(zip(FAMILIES, (2, 4, 3), strict=True)))
def test_logits_of_several_ranks_are_those_of_one(tmp_path: Path, family: str, size: int) -> None:
    """Biases added once; KV heads held twice; a vocabulary and a width that 3 does not divide."""
    fields = FAMILIES[family]
    target = write_target(tmp_path / "t", **fields)
    draft = write_draft(
        tmp_path / "d",
        hidden_size=fields.get("hidden_size", 32),
        target_hidden_size=fields.get("hidden_size", 32),
        vocab_size=fields.get("vocab_size", 128),
        num_heads=12,
        num_kv_heads=12,
    )
    alone = make_engine(target, draft)
    want = {
        str(i): torch.tensor(alone.top_logits(prompt, 5), dtype=torch.float64)
        for i, prompt in enumerate(prompts(3, seed=5))
    }
    run_ranks(same_states, size, target, draft, want)


def test_only_this_ranks_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the files, added up, is about half of them for one of two ranks."""
    folder = write_target(tmp_path / "t", num_layers=2)
    spec, read = parse_target(folder), []
    deliver = Checkpoint._deliver

    def count(self: Checkpoint, name: str, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        read.append(x.numel())
        return deliver(self, name, x, *rest)

    monkeypatch.setattr(Checkpoint, "_deliver", count)
    from engine.models.decoder import Decoder

    totals = []
    for size in (1, 2):
        read.clear()
        ranks: Any = type("R", (), {"rank": size - 1, "size": size})()
        at = Placement(torch.float32, torch.device("cpu"), ranks)
        with Checkpoint(folder) as weights:
            Decoder(spec, weights, at, 16)
            weights.finish()
        totals.append(sum(read))
    assert totals[1] < 0.52 * totals[0]
