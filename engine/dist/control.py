"""Messages between hosts' processes: JSON over a CPU group of its own.

Rank 0 tells, everybody listens; at start-up all ranks also compare notes. A rank that fails while
starting says so in place of its next note, so that no other rank waits for it.
"""

import json
import threading
from typing import Any, Protocol

import torch

from engine.errors import ProcessError, describe_error

_SHORT = 4096
"""Bytes that go in one exchange; longer messages take a second one."""

_FAIL_S = 5.0


class RankError(ProcessError):
    """Another rank cannot go on."""


class Control(Protocol):
    """Host messages; ranks enter every call together."""

    def tell(self, message: Any) -> Any:
        """Rank 0's message, on every rank; what others give is ignored."""

    def settle(self) -> None:
        """Wait until what this rank told is on its way for good: a process may end after it."""

    def exchange(self, note: Any) -> list[Any]:
        """Every rank's note, in rank order.

        Raises:
            RankError: A rank has failed.
        """

    def gather(self, number: int) -> list[int]:
        """Every rank's 64-bit number, in rank order: cheaper than `exchange`."""

    def fail(self, error: Exception) -> None:
        """Take part in the others' next `exchange` with an error."""


class NoControl:
    """One rank talks to nobody."""

    def tell(self, message: Any) -> Any:
        """The message."""
        return message

    def settle(self) -> None:
        """Nothing was told."""

    def exchange(self, note: Any) -> list[Any]:
        """The one note."""
        return [note]

    def gather(self, number: int) -> list[int]:
        """The one number."""
        return [number]

    def fail(self, error: Exception) -> None:
        """Nobody waits."""


class GlooControl:
    """Over gloo.

    Args:
        backend: A ProcessGroupGloo of its own, whose timeout suits an idle engine: a closed
            connection ends a wait at once, only silence takes that long.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._rank = backend.rank()
        self._size = backend.size()
        self._sending: Any = None

    def tell(self, message: Any) -> Any:
        """Rank 0's message: one broadcast of 4 KB, and another of the rest where it is longer.

        Rank 0 does not wait for a short one to be sent: its rounds have more than one.
        """
        self.settle()
        data = json.dumps(message).encode() if self._rank == 0 else b""
        first = _pack(data[:_SHORT], len(data))
        self._sending = self._backend.broadcast([first])
        if self._rank == 0 and len(data) <= _SHORT:
            return json.loads(data)
        self.settle()
        total = int(first[:8].view(torch.int64))
        if total <= _SHORT:
            return json.loads(bytes(first[8 : 8 + total].numpy()))
        rest = torch.zeros(total - _SHORT, dtype=torch.uint8)
        if self._rank == 0:
            rest.copy_(torch.frombuffer(bytearray(data[_SHORT:]), dtype=torch.uint8))
        self._backend.broadcast([rest]).wait()
        return json.loads(bytes(first[8:].numpy()) + bytes(rest.numpy()))

    def settle(self) -> None:
        """Wait for the last message; its failure is raised here."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.wait()

    def exchange(self, note: Any) -> list[Any]:
        """An all-gather of lengths, then of notes padded to the longest."""
        return [found["note"] for found in self._checked({"note": note})]

    def gather(self, number: int) -> list[int]:
        """One all-gather of 8 bytes a rank."""
        self.settle()
        every = torch.empty(self._size, dtype=torch.int64)
        self._backend._allgather_base(every, torch.tensor([number])).wait()
        return [int(value) for value in every.tolist()]

    def fail(self, error: Exception) -> None:
        """Tell the others' next exchange; their failures do not matter any more."""
        note = describe_error(error)
        telling = threading.Thread(target=self._gather, args=(note,), daemon=True)
        telling.start()
        # one that waits for this rank elsewhere will hear of its end instead
        telling.join(_FAIL_S)

    def _checked(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        notes = self._gather(note)
        for rank, found in enumerate(notes):
            if "error" in found:
                raise RankError(f"rank {rank}: {found['error']}", found["hint"], found["exit_code"])
        return notes

    def _gather(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        self.settle()
        data = json.dumps(note).encode()
        lengths = torch.empty(self._size, dtype=torch.int64)
        self._backend._allgather_base(lengths, torch.tensor([len(data)])).wait()
        width = int(lengths.max())
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = torch.empty(self._size * width, dtype=torch.uint8)
        self._backend._allgather_base(every, mine).wait()
        rows = every.view(self._size, width)
        return [json.loads(bytes(rows[r, : lengths[r]].numpy())) for r in range(self._size)]


def _pack(data: bytes, total: int) -> torch.Tensor:
    """[8 + _SHORT] uint8: the whole message's length, then its beginning."""
    padded = total.to_bytes(8, "little") + data.ljust(_SHORT, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)
