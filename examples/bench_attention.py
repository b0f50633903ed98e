"""Time the attention and K/V store kernels on one GPU against what the card can do.

    python examples/bench_attention.py

Prints microseconds a call, GB/s of KV read (or TFLOP/s), and the share of a copy (or of a matrix
product) measured in the same run. Every shape is checked before it is timed. Calls go through one
CUDA graph over as many layers as it takes to leave the cache cold.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.kv_store import kv_store
from engine.kernels.paged_attention import AttentionBatch, paged_attention, paged_attention_ref

HEADS, KV_HEADS, DIM, KV_BLOCK = 32, 8, 128, 16
DTYPE, SCALE = torch.bfloat16, DIM**-0.5
COLD_BYTES = 300e6  # several times the cache


@dataclass(frozen=True)
class Shape:
    requests: int
    context: int
    queries: int
    causal: bool = True

    @property
    def kv_bytes(self) -> int:
        return 2 * self.requests * (self.context + self.queries) * KV_HEADS * DIM * 2

    @property
    def flops(self) -> float:
        per_request = self.queries * self.context + self.queries * (
            (self.queries + 1) / 2 if self.causal else self.queries
        )
        return 4.0 * self.requests * per_request * HEADS * DIM

    def __str__(self) -> str:
        mask = "causal" if self.causal else "both ways"
        return f"{self.requests} x ({self.context} + {self.queries}) {mask}"


def replay_us(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one call, all of them in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def build(shape: Shape, num_layers: int) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Queries, [2, L, P, K, D] caches and the batch, KV blocks in random order."""
    length = shape.context + shape.queries
    columns = -(-length // KV_BLOCK)
    blocks = shape.requests * columns
    table = torch.randperm(blocks, device="cuda").view(shape.requests, columns)
    slots = (table[:, :, None] * KV_BLOCK + torch.arange(KV_BLOCK, device="cuda")).flatten(1)
    batch = AttentionBatch(
        table.int(),
        torch.arange(shape.requests + 1, dtype=torch.int32, device="cuda") * shape.queries,
        torch.full((shape.requests,), length, dtype=torch.int32, device="cuda"),
        KV_BLOCK,
        (shape.queries,) * shape.requests,
        (length,) * shape.requests,
        tuple(s[:length] for s in slots),
    )
    size = (2, num_layers, blocks * KV_BLOCK, KV_HEADS, DIM)
    caches = torch.empty(size, dtype=DTYPE, device="cuda").normal_()
    q = torch.randn(shape.requests * shape.queries, HEADS, DIM, dtype=DTYPE, device="cuda")
    return q, caches, batch


def attention_us(shape: Shape) -> float:
    """Check one layer against the reference, then time all of them."""
    num_layers = int(min(max(COLD_BYTES // shape.kv_bytes, 2), 128))
    q, caches, batch = build(shape, num_layers)

    def call(layer: int) -> torch.Tensor:
        k, v = caches[0, layer], caches[1, layer]
        return paged_attention(q, k, v, batch, scale=SCALE, causal=shape.causal)

    out = call(0).float()
    want = paged_attention_ref(
        q, caches[0, 0], caches[1, 0], batch, scale=SCALE, causal=shape.causal
    ).float()
    error = float((out - want).norm() / want.norm())
    if not error < 5e-3:
        raise SystemExit(f"{shape}: the kernel is wrong, relative error {error:.2g}")
    return replay_us([lambda layer=layer: call(layer) for layer in range(num_layers)])


def store_us(tokens: int) -> float:
    caches = torch.zeros(2, 8, 65536, KV_HEADS, DIM, dtype=DTYPE, device="cuda")
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device="cuda")
    k, v = qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    slots = torch.randperm(65536, device="cuda")[:tokens]
    kv_store(k, v, caches[0, 0], caches[1, 0], slots)
    if not (torch.equal(caches[0, 0, slots], k) and torch.equal(caches[1, 0, slots], v)):
        raise SystemExit(f"kv_store of {tokens} tokens is wrong")
    return replay_us(
        [lambda i=i: kv_store(k, v, caches[0, i], caches[1, i], slots) for i in range(8)]
    )


def eager_us(call: Callable[[], object]) -> float:
    """Median microseconds of one long call."""
    times = []
    for i in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure_copy() -> float:
    """GB/s read and written."""
    source, target = torch.empty(2, 2**30, dtype=torch.float32, device="cuda").normal_()
    return 2 * source.nbytes / eager_us(lambda: target.copy_(source)) / 1e3


def measure_matmul() -> float:
    """TFLOP/s."""
    a, b = torch.randn(2, 8192, 8192, dtype=DTYPE, device="cuda")
    return 2 * 8192**3 / eager_us(lambda: a @ b) / 1e6


def main() -> None:
    torch.manual_seed(0)
    copy_gbs, matmul_tflops = measure_copy(), measure_matmul()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}")
    print(f"{HEADS} heads, {KV_HEADS} KV heads, head dim {DIM}, {KV_BLOCK} tokens a KV block")
    print(f"copy {copy_gbs:.0f} GB/s (read and written), matmul {matmul_tflops:.0f} TFLOP/s\n")
    print(f"{'requests x (context + queries)':34}{'us':>9}{'KV GB/s':>9}{'of copy':>9}")
    shapes = [Shape(64, 2048, 8), Shape(64, 2048, 1)]
    shapes += [Shape(n, 256, queries) for queries in (1, 8) for n in (1, 8, 32, 64, 256)]
    shapes += [Shape(n, 256, 8, causal=False) for n in (1, 64)]
    for shape in shapes:
        us = attention_us(shape)
        gbs = shape.kv_bytes / us / 1e3
        print(f"{shape!s:34}{us:9.1f}{gbs:9.0f}{gbs / copy_gbs:9.0%}")
    print(f"\n{'prefill':34}{'us':>9}{'TFLOP/s':>9}{'of matmul':>10}")
    for shape in (Shape(1, 0, 8192), Shape(64, 0, 128), Shape(16, 0, 1024), Shape(1, 6144, 2048)):
        us = attention_us(shape)
        tflops = shape.flops / us / 1e6
        print(f"{shape!s:34}{us:9.1f}{tflops:9.0f}{tflops / matmul_tflops:10.0%}")
    print(f"\n{'kv_store':34}{'us':>9}{'GB/s':>9}{'of copy':>9}")
    for tokens in (8, 512, 8192):
        us = store_us(tokens)
        gbs = 2 * 2 * tokens * KV_HEADS * DIM * 2 / us / 1e3
        print(f"{f'{tokens} tokens':34}{us:9.1f}{gbs:9.0f}{gbs / copy_gbs:9.0%}")


if __name__ == "__main__":
    main()
