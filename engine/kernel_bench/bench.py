"""The rows of `dspark bench kernels`: every op is checked, and timed only if it is right."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from engine.checkpoints import Plan, plan_checkpoints
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernel_bench.attention_cases import Asked, attention_case
from engine.kernel_bench.case import Case
from engine.kernel_bench.choice_cases import accept_case, markov_case, sample_case
from engine.kernel_bench.deepseek_v4_cases import deepseek_v4_cases
from engine.kernel_bench.index_cases import (
    slot_mapping_case,
    step_inputs_case,
    write_blocks_case,
)
from engine.kernel_bench.layer_cases import (
    activation_case,
    gated_case,
    linear_case,
    norm_case,
    rope_product_case,
    rope_store_case,
)
from engine.kernel_bench.timing import Ceiling, measure_ceiling, seconds_a_call
from engine.kernels.linear import Linear
from engine.models.config import DraftSpec, TargetSpec
from engine.models.deepseek_v4_spec import V4TargetSpec
from engine.models.layers import Placement
from engine.placing import faster_threads, placement, usable_cores

COLD_BYTES = 3e8
"""Calls go round so much memory: several times what caches hold."""

_MOST_COPIES, _CALLS = 32, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is asked of the ops."""

    requests: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 256
    """KV tokens of each of them."""

    long_requests: int = 64
    long_context: int = 2048
    prefill: int = 8192
    """Tokens of one prompt, or the model's context where that is less."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One op at one shape."""

    op: str
    shape: str
    wrong: str | None
    """What is wrong with it; it was not timed then."""

    seconds: float
    nbytes: float
    flops: float
    share: float
    """Of the ceiling: the least time for so many bytes and FLOPs, over the time taken."""

    by_flops: bool
    """Is it the matrix rate that bounds it, not the memory's?"""


@dataclass(frozen=True)
class Bench:
    """What is measured, on what."""

    config: EngineConfig
    sizes: Sizes
    at: Placement
    plan: Plan

    @cached_property
    def ceiling(self) -> Ceiling:
        """What the device can do, measured when first asked for."""
        return measure_ceiling(self.at)

    def about(self) -> dict[str, str]:
        """For whoever reads the numbers later."""
        on_gpu = self.at.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.at.device) if on_gpu else "cpu",
            "path": "kernels" if on_gpu else "references: a CPU has no kernels",
            "torch": torch.__version__,
            "model": self.config.model,
            "draft": self.config.draft or "none",
            "dtype": str(self.at.dtype).removeprefix("torch."),
            "copy GB/s": f"{self.ceiling.copy / 1e9:.0f}",
            "matmul TFLOP/s": f"{self.ceiling.matmul / 1e12:.3g}",
        }

    def run(self, ops: frozenset[str] = frozenset()) -> Iterator[Measured]:
        """What measures one case after the other.

        Args:
            ops: Their names; none: all.

        Raises:
            ConfigError: There is no such op.
        """
        cases = self._cases()
        known = sorted({op for op, _ in cases})
        if unknown := sorted(ops - set(known)):
            what = f"this pair has no op {unknown[0]!r} that is measured"
            raise ConfigError(what, f"use some of {', '.join(known)}")
        asked = (make for op, make in cases if not ops or op in ops)
        return (measure(make(), self.at, self.ceiling) for make in asked)

    def _cases(self) -> list[tuple[str, Callable[[], Case]]]:
        sizes, target, gamma = self.sizes, self.plan.target, self.plan.num_speculative_tokens
        if isinstance(target, V4TargetSpec):
            layers = target.layers
            return deepseek_v4_cases(layers, sizes.requests, sizes.context, gamma + 1, self.at)
        return self._dense_cases(target, gamma)

    def _dense_cases(self, target: TargetSpec, gamma: int) -> list[tuple[str, Callable[[], Case]]]:
        sizes, at, spec, vocab = self.sizes, self.at, target.layers, target.vocab_size
        width = gamma + 1
        hidden, inner = spec.hidden_size, spec.intermediate_size
        heads = spec.num_heads * spec.head_dim
        qkv = heads + 2 * spec.num_kv_heads * spec.head_dim

        def attention(*asked: Asked) -> list[tuple[str, Callable[[], Case]]]:
            return [("attention", partial(attention_case, a, spec, at)) for a in asked]

        prompt = min(sizes.prefill, target.max_position)
        cases = attention(
            Asked(sizes.long_requests, sizes.long_context, width),
            Asked(sizes.long_requests, sizes.long_context, 1),
            Asked(1, 0, prompt),
            Asked(64, 0, max(prompt // 64, 1)),
        )
        for n in sizes.requests:
            tokens = n * width
            cases += attention(Asked(n, sizes.context, width), Asked(n, sizes.context, 1))
            draft = self.plan.draft
            if isinstance(draft, DraftSpec):
                cases += attention(Asked(n, sizes.context, width, causal=False))
                if draft.markov == "vanilla":
                    cases.append(("markov_chain", partial(markov_case, n, gamma, draft, at)))
            cases += [
                ("linear", partial(linear_case, "q, k and v", tokens, hidden, qkv, at)),
                ("linear", partial(linear_case, "o", tokens, heads, hidden, at)),
                ("gated_linear", partial(gated_case, tokens, spec, at)),
                ("linear", partial(linear_case, "down", tokens, inner, hidden, at)),
                ("linear", partial(linear_case, "lm_head", tokens, hidden, vocab, at)),
                ("add_rms_norm", partial(norm_case, tokens, spec, at)),
                ("silu_mul", partial(activation_case, tokens, spec, at)),
                ("rope_product", partial(rope_product_case, tokens, spec, at)),
                ("rope_store", partial(rope_store_case, tokens, spec, at)),
                ("accept", partial(accept_case, n, gamma, vocab, at)),
                ("sample", partial(sample_case, n, vocab, at)),
                ("step_inputs", partial(step_inputs_case, n, width, at.device)),
                ("slot_mapping", partial(slot_mapping_case, n, width, sizes.context, at.device)),
                ("write_blocks", partial(write_blocks_case, n, at.device)),
            ]
        return cases


def prepare(config: EngineConfig, sizes: Sizes) -> Bench:
    """Find the shapes and, on a CPU, how many threads to use.

    Raises:
        ConfigError: The device is not there, or the checkpoints do not go together.
        CheckpointError: A checkpoint cannot be served.
    """
    plan, _ = plan_checkpoints(config)
    at = placement(config, plan.target)
    if at.device.type == "cpu":
        torch.set_num_threads(config.threads or _threads(plan, at))
    return Bench(config, sizes, at, plan)


def _threads(plan: Plan, at: Placement) -> int:
    """As many as an engine would take: all cores, or one if that is faster."""
    hidden = plan.target.layers.hidden_size
    shapes = [(hidden, hidden)]
    if isinstance(plan.target, TargetSpec):
        inner = plan.target.layers.intermediate_size
        shapes += [(2 * inner, hidden), (hidden, inner)]
    products = [Linear(torch.empty(shape, dtype=at.dtype).normal_()) for shape in shapes]
    return faster_threads(products, at.dtype, usable_cores())


@torch.inference_mode()
def measure(case: Case, at: Placement, ceiling: Ceiling) -> Measured:
    """Check an op, then time it over inputs that no cache holds."""
    torch.manual_seed(0)
    inputs = case.make()
    wrong = case.check(inputs, case.run(inputs))
    if wrong is not None:
        return Measured(case.op, case.shape, wrong, 0.0, case.nbytes, case.flops, 0.0, False)
    copies = 1
    if at.device.type == "cuda":
        copies = int(min(max(COLD_BYTES // max(case.nbytes, 1), 1), _MOST_COPIES))
    every = [inputs] + [case.make() for _ in range(copies - 1)]
    rounds = max(_CALLS // copies, 1) if at.device.type == "cuda" and copies > 1 else 1
    calls = [partial(case.run, one) for one in every] * rounds
    seconds = seconds_a_call(list(calls), at.device)
    return Measured(
        op=case.op,
        shape=case.shape,
        wrong=None,
        seconds=seconds,
        nbytes=case.nbytes,
        flops=case.flops,
        share=ceiling.seconds(case.nbytes, case.flops) / seconds,
        by_flops=case.flops / ceiling.matmul > case.nbytes / ceiling.copy,
    )
