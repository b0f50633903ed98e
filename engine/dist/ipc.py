"""Device memory that processes of one host share, through the CUDA runtime that torch has loaded.

torch shares tensors too, but counts their users across processes, and complains on the screen when
a rank ends before another one has let go. Here memory lives as long as the process that made it.
"""

import ctypes
from pathlib import Path
from typing import Any

_spare: dict[int, list[int]] = {}
"""Addresses by size: memory that another process may map still is kept for the next one to ask."""

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_NON_BLOCKING = 1
_HOST_TO_DEVICE = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * _HANDLE_BYTES),)


class CudaRuntime:
    """The few calls that it takes. Everything is of the current device.

    Raises:
        OSError: torch has loaded no CUDA runtime of its own.
    """

    def __init__(self) -> None:
        loaded = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libcudart" in line
        }
        if not loaded:
            raise OSError("torch has loaded no libcudart")
        self._lib: Any = ctypes.CDLL(min(loaded))
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        self._lib.cudaMalloc.argtypes = [ctypes.POINTER(pointer), ctypes.c_size_t]
        self._lib.cudaMemset.argtypes = [pointer, ctypes.c_int, ctypes.c_size_t]
        self._lib.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
        self._lib.cudaIpcOpenMemHandle.argtypes = [
            ctypes.POINTER(pointer),
            _Handle,
            ctypes.c_uint,
        ]
        self._lib.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
        self._lib.cudaStreamCreateWithFlags.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
        self._lib.cudaStreamSynchronize.argtypes = [pointer]
        self._side = pointer()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(self._side), _NON_BLOCKING)
        self._device = ctypes.c_int()
        self._call("cudaGetDevice", ctypes.byref(self._device))

    def allocate(self, num_bytes: int) -> int:
        """Address of zeros, which every later write comes after.

        Raises:
            RuntimeError: There is no memory.
        """
        spare = _spare.get(num_bytes, [])
        found = ctypes.c_void_p(spare.pop() if spare else None)
        if found.value is None:
            self._call("cudaMalloc", ctypes.byref(found), num_bytes)
        self._call("cudaMemset", found, 0, num_bytes)
        self._call("cudaDeviceSynchronize")
        return int(found.value or 0)

    def release(self, address: int, num_bytes: int) -> None:
        """Give back what `allocate` gave; nobody writes to it any more."""
        _spare.setdefault(num_bytes, []).append(address)

    def share(self, address: int) -> str:
        """What another process needs to map what `allocate` gave.

        Raises:
            RuntimeError: It cannot be shared.
        """
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle).hex()

    def map(self, handle: str) -> int:
        """Address, here, of what another process shares; its GPU may be another one.

        Raises:
            RuntimeError: The current device cannot reach it.
        """
        found = ctypes.c_void_p()
        what = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cudaIpcOpenMemHandle", ctypes.byref(found), what, _ENABLE_PEER_ACCESS)
        return int(found.value or 0)

    def write(self, address: int, value: int) -> None:
        """Write an int32 while kernels run, from any thread; returns when it is there.

        Raises:
            RuntimeError: The device is lost.
        """
        self._call("cudaSetDevice", self._device)
        word = ctypes.c_int32(value)
        self._call(
            "cudaMemcpyAsync", address, ctypes.byref(word), 4, _HOST_TO_DEVICE, self._side
        )
        self._call("cudaStreamSynchronize", self._side)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.cudaGetLastError()  # torch is not to find it later
            raise RuntimeError(f"{name}: {self._lib.cudaGetErrorString(code).decode()}")
