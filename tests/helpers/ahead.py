"""Kernels compiled for a GPU that is not there: what the interpreter takes, a compiler may not."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
SHARED_MEMORY = 227 << 10
"""Bytes that a program of an H200 may have."""


class Compiled:
    """Everything that was launched, compiled instead of run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: dict[str, list[Any]] = {}
        self._seen: set[str] = set()

    def launch(self, kernel: Any, *args: Any, **named: Any) -> None:
        """In place of JITFunction.run."""
        names = [p.name for p in kernel.params]
        given = dict(zip(names, args, strict=False))
        options = {k: v for k, v in named.items() if k not in (*names, "grid", "warmup")}
        given |= {k: v for k, v in named.items() if k in names}
        if "DEPENDENT" in given:  # as on the real device
            given["DEPENDENT"], options["launch_pdl"] = True, True
        signature, constants, hints = {}, {}, {}
        for i, p in enumerate(kernel.params):
            value = given[p.name]
            whole = isinstance(value, int) and not p.is_constexpr and not p.do_not_specialize
            if p.is_constexpr or (whole and value == 1):
                signature[p.name], constants[p.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[p.name] = "*" + _TYPES[value.dtype]
                hints[i,] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                signature[p.name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
            elif isinstance(value, float):
                signature[p.name] = "fp32"
            else:
                signature[p.name] = "i32"
                if whole and value % 16 == 0:
                    hints[i,] = [["tt.divisibility", 16]]
        key = f"{kernel.__name__} {signature} {constants} {options}"
        if key in self._seen:
            return
        self._seen.add(key)
        source = ASTSource(kernel, signature, constants, hints)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= SHARED_MEMORY, key
        self.kernels.setdefault(kernel.__name__, []).append(made)

    def machine_code(self, name: str) -> str:
        """What a kernel became, as text."""
        file = self.folder / f"{name}.cubin"
        file.write_bytes(self.kernels[name][0].asm["cubin"])
        tool = Path(os.path.dirname(triton.__file__), "backends/nvidia/bin/nvdisasm")
        return subprocess.run([tool, file], capture_output=True, text=True, check=True).stdout


@contextmanager
def compiling(folder: Path) -> Iterator[Compiled]:
    """Ops take their kernels' way, and compile; outputs are whatever memory held."""
    found = Compiled(folder)

    def run(kernel: Any, *args: Any, **named: Any) -> None:
        found.launch(kernel, *args, **named)

    with (
        patch.object(JITFunction, "run", run),
        patch.object(torch.Tensor, "is_cuda", True, create=True),
        patch("engine.kernels.launch.capable", lambda _: False),
        patch.dict(os.environ, TRITON_DEFAULT_FP_FUSION="1"),  # what it is; triton warns of it
    ):
        yield found
