"""The `dspark` command in this process, with the fake engine behind it."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dspark_cli import backend
from dspark_cli.main import run
from tests.cli import fake


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str


@dataclass(frozen=True)
class Bench:
    """A folder with a checkpoint, an input and an output."""

    folder: Path
    call: Callable[..., Result]

    @property
    def input(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def journal(self) -> Path:
        return self.folder / "out.journal"

    @property
    def errors_file(self) -> Path:
        return self.folder / "out.errors.jsonl"

    def write(self, rows: list[Any]) -> None:
        """Rows as JSON; bytes as they are."""
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        self.input.write_bytes(b"".join(line + b"\n" for line in lines))

    def generate(self, *args: str, code: int = 0, source: str | None = None) -> Result:
        """Run it on the input, with a drafter, and check the exit code."""
        given = [source or str(self.input), "-o", str(self.output), "-m", str(self.folder / "m")]
        result = self.call("generate", *given, "-d", str(self.folder / "d"), *args)
        assert result.code == code, result.err
        return result

    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.output.read_bytes())

    def errors(self) -> list[dict[str, Any]]:
        return read_lines(self.errors_file.read_bytes()) if self.errors_file.exists() else []


def read_lines(data: bytes) -> list[dict[str, Any]]:
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def make_checkpoints(folder: Path) -> None:
    for name in ("m", "d"):
        (folder / name).mkdir()
        config = {"max_position_embeddings": fake.CONTEXT, "name": name}
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(name.encode() * 1000)


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Bench:
    make_checkpoints(tmp_path)
    monkeypatch.setattr(backend, "locate_checkpoint", fake.locate)
    monkeypatch.setattr(backend, "load_tokenizer", lambda _folder: fake.FakeTokenizer())
    monkeypatch.setattr(backend, "check_checkpoints", lambda _config: None)
    monkeypatch.setattr(backend, "load_engine", fake.FakeEngine)
    fake.FakeEngine.loads = 0

    def call(*args: str, stdin: bytes | None = None) -> Result:
        capsysbinary.readouterr()
        with monkeypatch.context() as patch:
            if stdin is not None:
                patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            with pytest.raises(SystemExit) as info:
                run(list(args))
        out, err = capsysbinary.readouterr()
        return Result(int(info.value.code or 0), out, err.decode())

    return Bench(tmp_path, call)
