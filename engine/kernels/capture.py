"""CUDA graphs: one way to capture, on one stream, that survives a full device.

cuBLAS keeps a workspace (32 MiB on an H200) for every stream that a thread has ever called it on,
and torch hands out 32 streams by turns: a new one for each warm-up takes a gigabyte little by
little, most of it after the KV cache was sized. Graphs use the workspace of the stream that they
were captured on: torch's cache of workspaces must not be cleared while they live.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def capture(
    body: Callable[[], T],
    *,
    warm_up: Callable[[], object] | None = None,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture what `body` launches on the current CUDA device, and where it leaves its results.

    Args:
        body: Launches kernels; neither synchronizes nor reads results.
        warm_up: Called once before, on the stream of the capture: has to compile all kernels and
            fill all caches, so that nothing but launches is left. None: `body`.
        pool: Memory of graphs that never run at the same time, as `CUDAGraph.pool()` names it.

    Raises:
        RuntimeError: Of `body`, or of the capture's end, which then has the reason as its context
            (`engine.runner.out_of_memory`). What was captured before can still be used.
    """
    stream = _stream(torch.cuda.current_device())
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            (warm_up or body)()
    finally:  # what it launched uses inputs and workspace of other graphs
        before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            out = body()
    finally:
        torch.cuda.set_stream(before)  # a capture that fails leaves its own behind
    return graph, out


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures of this process on one device."""
    _keep_registered(device)
    return torch.cuda.Stream(device)


@cache  # which is what keeps it alive
def _keep_registered(device: int) -> torch.cuda.CUDAGraph:
    """A graph, never captured, that the current device's generator knows as long as this lives.

    Torch 2.11 allocates as a capture begins if the generator has no other graph. Where that fails,
    the new graph's destructor finds itself unregistered and aborts the process. (Torch 2.13 keeps
    such state by capture: there this does nothing.)
    """
    # an inference tensor could not be filled outside of inference mode, by a capture there
    with torch.inference_mode(False):
        # registering takes two small blocks: without room for them these raise, and no harm is done
        room = [torch.empty(1, dtype=torch.int64, device=f"cuda:{device}") for _ in range(2)]
        del room
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(torch.cuda.default_generators[device])
    return graph
