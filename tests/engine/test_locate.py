"""A model's name: a folder, the demo, or a Hub id; the network is never asked here."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine import locate as module
from engine.errors import CheckpointError
from engine.locate import locate


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> str:
        raise AssertionError(f"asked the Hub for {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "org/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(tmp_path / "org/model"), "target") == tmp_path / "org/model"
    assert locate("org/model", "draft") == Path("org/model")
    assert locate("~/org/model", "target") == tmp_path / "org/model"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("./gone", "the folder ./gone does not exist", "check the path"),
        ("/no/such/dir", "the folder /no/such/dir does not exist", "check the path"),
        ("../gone/model", "does not exist", "check the path"),
        ("a/b/c", "the folder a/b/c does not exist", "check the path"),
        ("gone", "the folder gone does not exist", "check the path"),
        ("here/gone", "the folder here/gone does not exist", "check the path"),
        ("shape:qwen3-8b", "which only `dspark bench` makes", "give a checkpoint folder"),
        ("here/file.txt", "is a file, not a checkpoint folder", "give the folder: here"),
        ("here", "has no config.json", "Hugging Face checkpoint folder"),
    ],
)
def test_a_path_that_is_not_there_does_not_ask_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str, hint: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        locate(name, "target")
    assert hint in error.value.hint


def test_a_hub_id_downloads_weights_configs_and_tokenizer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "cache")
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert locate("Org-1/Model_v2.5", "target") == tmp_path / "cache"
    [(name, options)] = calls
    assert name == "Org-1/Model_v2.5"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(options["allow_patterns"])
    assert not {"*.bin", "*.pt", "*.py"} & set(options["allow_patterns"])


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (LocalEntryNotFoundError("x"), "not in the local cache and the Hub cannot be reached"),
        (OSError("disk full"), r"cannot be downloaded \(disk full\)"),
        (ValueError("bad id\nmore"), r"cannot be downloaded \(bad id\)"),
    ],
)
def test_hub_trouble_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, message: str
) -> None:
    def fail(name: str, **_: Any) -> str:
        raise problem

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        locate("org/model", "draft")
    assert "org/model is not a local folder" in str(error.value)
    assert "local folder" in error.value.hint


def test_the_demo_pair_ships_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "drafter", "drafter_rnn"):
        folder(tmp_path / "package" / name)
    folder(tmp_path / "demo")
    monkeypatch.setattr(module, "files", lambda _: tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    assert locate("demo", "target") == tmp_path / "package/target"
    assert locate("demo", "draft") == tmp_path / "package/drafter"
    assert locate("demo-rnn", "draft") == tmp_path / "package/drafter_rnn"
    assert locate("./demo", "target") == Path("demo")
    with pytest.raises(CheckpointError, match="demo-rnn is a draft, not a model"):
        locate("demo-rnn", "target")


def test_an_installation_without_the_demo_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> Path:
        raise ModuleNotFoundError("no")

    monkeypatch.setattr(module, "files", gone)
    with pytest.raises(CheckpointError, match="no demo target") as error:
        locate("demo", "target")
    assert "install dspark again" in error.value.hint
