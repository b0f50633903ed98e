"""Weights: every tensor used or an error, shapes checked, files whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError
from engine.models.headers import read_headers, same_bytes, stored_dtype
from engine.models.loader import Checkpoint
from engine.models.shard import Part
from tests.helpers.checkpoints import read_tensors, write_draft, write_target, write_tensors

INDEX = "model.safetensors.index.json"


def take_all(weights: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: weights.take(name, weights.shape(name), dtype=dtype, device="cpu")
        for name in sorted(weights.names)
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_back_whole_or_sharded(tmp_path: Path, shards: int) -> None:
    write_draft(tmp_path, shards=shards)
    written = read_tensors(tmp_path)
    with Checkpoint(tmp_path) as weights:
        taken = take_all(weights)
        weights.finish()
    assert taken.keys() == written.keys()
    assert all(torch.equal(taken[name], written[name]) for name in written)


def test_transformers_own_shards_and_dtype_conversion(tmp_path: Path) -> None:
    write_target(tmp_path, dtype="bfloat16", max_shard_size="8KB", tokenizer=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    written = read_tensors(tmp_path)
    with Checkpoint(tmp_path) as weights:
        taken = take_all(weights)
        weights.finish()
    assert all(torch.equal(taken[name], written[name].float()) for name in written)
    assert stored_dtype(read_headers(tmp_path)) == "bfloat16"


def test_a_single_file_of_any_name_will_do(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    with Checkpoint(tmp_path) as weights:
        assert weights.names == {"a"}


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as weights:
        a = weights.take("a", (4,), dtype=torch.float32, device="cpu")
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert a.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_parts_of_a_tensor_for_one_rank(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    save_file({"a": whole}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as weights:
        rows, columns, last = (
            weights.take("a", (4, 6), dtype=torch.float64, device="cpu", part=part)
            for part in (Part(0, 1, 3, 2), Part(1, 2, 6, 4), Part(0, 3, 4, 3))
        )
        weights.finish()
        with pytest.raises(CheckpointError, match=r"shape \[4, 7\] by config.json, got \[4, 6\]"):
            weights.take("a", (4, 7), dtype=torch.float32, device="cpu", part=Part(0, 1, 3, 2))
    assert torch.equal(rows, whole[1:3].double())
    assert torch.equal(columns, whole[:, 2:].double())
    assert torch.equal(last, torch.cat((whole[3:], torch.zeros(2, 6))).double()), "zeros behind it"


def test_progress_counts_bytes_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    seen: list[tuple[str, int, int]] = []
    with Checkpoint(tmp_path, on_progress=lambda *call: seen.append(call)) as weights:
        for name, size in (("a", 4), ("a", 4), ("b", 2)):
            weights.take(name, (size,), dtype=torch.float32, device="cpu")
        weights.finish()
    assert [(done, total) for _, done, total in seen] == [(16, 24), (24, 24), (24, 24)]
    assert {phase for phase, _, _ in seen} == {f"load {tmp_path.name}"}


def test_unused_tensors_are_named_and_documented_ones_ignored(tmp_path: Path) -> None:
    ignored = ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", "t2d")
    tensors = {name: torch.ones(1) for name in (*ignored, "fc.weight", "extra.weight", "d2t")}
    write_tensors(tmp_path, tensors)
    with Checkpoint(tmp_path) as weights:
        weights.take("fc.weight", (1,), dtype=torch.float32, device="cpu")
        with pytest.raises(
            CheckpointError, match=r"2 tensors .* describes: d2t, extra.weight"
        ) as e:
            weights.finish()
        assert "config.json" in e.value.hint
        for name in ("d2t", "extra.weight"):
            weights.take(name, (1,), dtype=torch.float32, device="cpu")
        weights.finish()


def test_lm_head_of_a_tied_target_must_be_the_embedding(tmp_path: Path) -> None:
    embedding = torch.randn(8, 4)
    for tied, good in ((embedding.clone(), True), (embedding + 1, False), (None, True)):
        tensors = {"model.embed_tokens.weight": embedding}
        if tied is not None:
            tensors["lm_head.weight"] = tied
        write_tensors(tmp_path, tensors)
        with Checkpoint(tmp_path) as weights:
            weights.take("model.embed_tokens.weight", (8, 4), dtype=torch.float32, device="cpu")
            if good:
                weights.check_copy("lm_head.weight", of="model.embed_tokens.weight")
                weights.finish()
            else:
                with pytest.raises(CheckpointError, match=r"lm_head.weight differs from") as error:
                    weights.check_copy("lm_head.weight", of="model.embed_tokens.weight")
                assert "tie_word_embeddings" in error.value.hint


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write_draft(tmp_path)
    cpu = {"dtype": torch.float32, "device": "cpu"}
    with Checkpoint(tmp_path) as weights:
        with pytest.raises(CheckpointError, match=r"tensor gone.weight is missing") as error:
            weights.take("gone.weight", (1,), **cpu)
        assert error.value.hint
        with pytest.raises(CheckpointError, match=r"similar: layers.0.self_attn.q_proj.weight"):
            weights.take("model.layers.0.self_attn.q_proj.weight", (1,), **cpu)
        with pytest.raises(
            CheckpointError, match=r"norm.weight must have shape \[33\] .* got \[32\]"
        ):
            weights.take("norm.weight", (33,), **cpu)
        with pytest.raises(CheckpointError, match=r"norm.weight must be an integer, got F32"):
            weights.take("norm.weight", (32,), dtype=torch.int64, device="cpu")


def test_integers_stay_integers(tmp_path: Path) -> None:
    save_file({"d2t": torch.tensor([3, 5])}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as weights:
        assert weights.take("d2t", (2,), dtype=torch.int64, device="cpu").tolist() == [3, 5]
        with pytest.raises(CheckpointError, match="d2t must be F32, F16 or BF16, got I64"):
            weights.take("d2t", (2,), dtype=torch.float32, device="cpu")


def _nothing(folder: Path) -> None:
    pass


def _pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _ambiguous(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "x.safetensors")
    save_file({"b": torch.ones(1)}, folder / "y.safetensors")


def _lost_shard(folder: Path) -> None:
    write_tensors(folder, {"a": torch.ones(1), "b": torch.ones(1)}, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _wrong_index(folder: Path) -> None:
    write_tensors(folder, {"a": torch.ones(1), "b": torch.ones(1)}, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _escaping_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}')


def _empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def _twice(folder: Path) -> None:
    write_tensors(folder, {"a": torch.ones(1), "b": torch.ones(1)}, shards=2)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")


def _torn(folder: Path) -> None:
    save_file({"a": torch.ones(100)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])


def _cut_in_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((999).to_bytes(8, "little") + b"{")


def _empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _bad_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{]")


@pytest.mark.parametrize(
    ("damage", "message", "hint"),
    [
        (_nothing, r"holds no \*.safetensors file", "safetensors weights"),
        (_pickled, "only as pytorch_model.bin; pickled weights are not", "safe_serialization=True"),
        (_ambiguous, r"holds 2 safetensors files \(x.safetensors, ...\) but no", "keep the one"),
        (_lost_shard, "lists model-00002-of-00002.safetensors, absent", "download"),
        (_wrong_index, "puts c in model-00001-of-00002.safetensors, which lacks it", "download"),
        (_escaping_index, "file names inside the folder, got '../a.safetensors'", "download"),
        (_empty_index, "has no weight_map", "download"),
        (_twice, "tensor b is in both model-00001-of-00002", "download"),
        (_torn, "the header promises 4.. bytes, the file has 4..", "download"),
        (_cut_in_header, "9 bytes end inside the header", "download"),
        (_empty_file, "torn or not safetensors", "download"),
        (_bad_header, "torn or not safetensors: bad header", "download"),
    ],
)
def test_damaged_folders_are_one_clear_error(
    tmp_path: Path, damage: object, message: str, hint: str
) -> None:
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint(tmp_path)
    assert hint in error.value.hint
    assert str(tmp_path) in str(error.value)


def test_same_bytes_compares_contents_in_chunks(tmp_path: Path) -> None:
    a = torch.randn(10, 3)
    late = a.clone()
    late[-1, -1] += 1
    save_file({"a": a, "b": a.clone(), "late": late, "low": a.half()}, tmp_path / "x.safetensors")
    headers = read_headers(tmp_path)
    found = {n: same_bytes(headers["a"], headers[n], chunk=16) for n in ("b", "late", "low")}
    assert found == {"b": True, "late": False, "low": False}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_reach_the_device_without_a_copy_on_the_host(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """2 GB in 16 tensors: the process's own memory grows by less than two of them."""
    size = (8192, 8192)
    tensors = {f"w{i}": torch.full(size, float(i), dtype=torch.bfloat16) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    torch.zeros(1, device="cuda")
    before, most = own_memory(), 0
    with Checkpoint(tmp_path, on_progress=lambda *_: None) as weights:
        for i in range(16):
            tensor = weights.take(f"w{i}", size, dtype=dtype, device="cuda")
            assert (tensor.device.type, tensor.dtype) == ("cuda", dtype)
            assert (tensor == i).all()
            most = max(most, own_memory())
            del tensor
        weights.finish()
    assert most - before < 2 * 2 * 8192 * 8192


def own_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    (line,) = [row for row in status.splitlines() if row.startswith("RssAnon")]
    return int(line.split()[1]) * 1024
