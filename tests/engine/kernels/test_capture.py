"""Captures: one stream, and a torch that may not have any more memory."""

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine
from engine.kernels.capture import capture

_BEGINNING = """
import torch
from engine.kernels.capture import capture

x = torch.zeros(4, device="cuda")
total = torch.cuda.mem_get_info()[1]

def fill():
    held = []  # nothing is left in what torch keeps
    for size in (1 << 20, 1 << 9):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    return held

def allow(full):
    torch.cuda.empty_cache()
    share = torch.cuda.memory_reserved() / total if full else 1.0
    torch.cuda.set_per_process_memory_fraction(share)
"""


def run(script: str) -> None:
    """In a process of its own, which torch may abort."""
    done = subprocess.run(
        [sys.executable, "-c", _BEGINNING + script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.split() == ["as", "it", "should"], done.stdout


def test_all_graphs_are_captured_here() -> None:
    """A stream of their own would take a workspace, and torch's way aborts on a full device."""
    folder = Path(engine.__file__).parent
    found = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if re.search(
            r"(CUDAGraph|cuda\.graph|[a-z]\.Stream|make_graphed_callables)\(",
            path.read_text("utf-8"),
        )
    }
    assert found == {"kernels/capture.py"}


@pytest.mark.gpu
def test_a_first_capture_on_a_full_device_is_an_error_and_no_abort() -> None:
    """A torch that allocates as it begins destroyed a graph that it had not registered yet."""
    run("""
allow(full=True)
held = fill()
try:
    capture(lambda: x.add_(1))
    print("captured")
except torch.OutOfMemoryError:
    print("as")
del held
allow(full=False)
graph, _ = capture(lambda: x.add_(1))
x.zero_()
graph.replay()
print("it should" if x.tolist() == [1.0] * 4 else x.tolist())
""")


@pytest.mark.gpu
def test_captures_on_a_full_device_once_all_graphs_are_gone() -> None:
    """As after a shortage: what was captured is dropped, and captured again."""
    run("""
graph, _ = capture(lambda: x.add_(1))
del graph
allow(full=True)
held = fill()
graph, _ = capture(lambda: x.add_(1))
x.zero_()
graph.replay()
print("as" if x.tolist() == [1.0] * 4 else x.tolist())
try:
    capture(lambda: x + 1 if torch.cuda.is_current_stream_capturing() else x)
    print("captured")
except torch.OutOfMemoryError:
    print("it")
graph.replay()
print("should" if x.tolist() == [2.0] * 4 else x.tolist())
""")


@pytest.mark.gpu
def test_captures_and_replays_in_and_out_of_inference_mode() -> None:
    """What torch's generator keeps for all graphs is no inference tensor."""
    run("""
with torch.inference_mode():
    graph, _ = capture(lambda: x.add_(1))
del graph
graph, _ = capture(lambda: x.add_(1))
x.zero_()
graph.replay()
with torch.inference_mode():
    graph.replay()
print("as it should" if x.tolist() == [2.0] * 4 else x.tolist())
""")


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_and_the_next_one_alone() -> None:
    before = torch.cuda.current_stream()
    x = torch.zeros(4, device="cuda")

    def fails() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        capture(fails)
    assert torch.cuda.current_stream() == before
    graph, _ = capture(lambda: x.add_(1))
    x.zero_()
    graph.replay()
    assert x.tolist() == [1.0] * 4


@pytest.mark.gpu
def test_captures_leave_no_workspaces_behind() -> None:
    """Each stream that cuBLAS is called on costs 32 MiB, and torch has 32 of them."""
    a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    capture(lambda: a @ a)
    gc.collect()
    before = reserved()
    for _ in range(8):
        capture(lambda: a @ a)
    assert reserved() <= before
