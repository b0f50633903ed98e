"""One NCCL communicator through ctypes, on the libnccl that torch has loaded.

Everything goes to the stream that is current in torch, so calls order themselves with kernels and
may be captured in CUDA graphs; with captured calls the addresses and splits are those of the
capture. torch.distributed's own communicator stays unused, so that no second set of buffers exists.
"""

import ctypes
import os
from typing import Any

import torch

from engine.dist.collectives import SumThenNorm, split_rows
from engine.errors import DSparkError

_SUM = 0
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.bool: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    """What ranks of one communicator share; made by one, sent to all."""

    _fields_ = (("data", ctypes.c_byte * 128),)


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, UniqueId, _INT],
    "ncclCommAbort": [_POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
}


class Library:
    """libnccl's functions; a failed call is an error that names it.

    Raises:
        OSError: torch has loaded no libnccl.
    """

    def __init__(self) -> None:
        # only what is loaded already: another copy would not know torch's CUDA context
        self._lib = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = _INT, arguments
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        self._lib.ncclGetErrorString.argtypes = [_INT]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            DSparkError: It failed.
        """
        code = getattr(self._lib, name)(*arguments)
        if code:
            what = self._lib.ncclGetErrorString(code).decode()
            raise DSparkError(f"{name}: {what}", "NCCL_DEBUG=WARN says more")

    def version(self) -> str:
        """As 2.27.5."""
        number = _INT()
        self.call("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> list[int]:
        """A new communicator's name, 128 numbers."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return [byte & 0xFF for byte in made.data]


class PyNccl(SumThenNorm):
    """Collectives over one communicator.

    Args:
        library: libnccl.
        rank: This rank.
        size: Ranks in all.
        unique_id: From `Library.unique_id` of one rank.
        device: This rank's CUDA device; no two ranks share one.

    Raises:
        DSparkError: The communicator could not be made.
    """

    def __init__(
        self, library: Library, rank: int, size: int, unique_id: list[int], device: torch.device
    ) -> None:
        self.rank, self.size = rank, size
        self.name = f"NCCL {library.version()}"
        self._library = library
        self._comm = _POINTER()
        name = UniqueId()
        ctypes.memmove(name.data, bytes(unique_id), 128)
        with torch.cuda.device(device):
            library.call("ncclCommInitRank", ctypes.byref(self._comm), size, name, rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where `x` is contiguous."""
        x = x.contiguous()
        self._run("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], _SUM)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]."""
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._run("ncclAllGather", x.data_ptr(), out.data_ptr(), x.numel(), _TYPES[x.dtype])
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's, in place where `x` is contiguous."""
        x = x.contiguous()
        self._run("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], 0)
        return x

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        """Sends and receives in one group; what a rank has for itself is a copy on the device."""
        if not (out.is_contiguous() and x.is_contiguous()):
            raise ValueError("out, x: expected contiguous tensors")
        if out.dtype != x.dtype or out.shape[1:] != x.shape[1:]:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, x {x.dtype} {tuple(x.shape)}")
        received = split_rows(len(out), out_splits, self.size, "out")
        sent = split_rows(len(x), in_splits, self.size, "x")
        if received[self.rank] != sent[self.rank]:
            raise ValueError(f"rank {self.rank} keeps {sent[self.rank]} rows for itself and "
                             f"expects {received[self.rank]}")
        per_row = x[:1].numel() if len(x) else out[:1].numel()
        kind = _TYPES[x.dtype]
        into, outof = out.split(received), x.split(sent)
        into[self.rank].copy_(outof[self.rank])
        self._library.call("ncclGroupStart")
        try:
            for peer in range(self.size):
                if peer == self.rank:
                    continue
                # a side without rows stays silent, and so does its peer
                if sent[peer]:
                    self._run("ncclSend", outof[peer].data_ptr(), sent[peer] * per_row, kind, peer)
                if received[peer]:
                    rows = received[peer] * per_row
                    self._run("ncclRecv", into[peer].data_ptr(), rows, kind, peer)
        finally:
            self._library.call("ncclGroupEnd")

    def abort(self) -> None:
        """End the communicator, and kernels that wait in it."""
        comm, self._comm = self._comm, _POINTER()
        if comm.value is not None:
            self._library.call("ncclCommAbort", comm)

    def _run(self, name: str, *arguments: Any) -> None:
        if self._comm.value is None:
            raise DSparkError("the ranks' communicator has been closed")
        stream = torch.cuda.current_stream().cuda_stream
        self._library.call(name, *arguments, self._comm, stream)
