"""What the finished pair can do: accuracy, acceptance, and a few answers kept word for word."""

import json
import multiprocessing
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.demo import problems, tokens
from examples.demo.reference_loop import ReferenceLoop, Trace

DRAFTERS = ("drafter", "drafter_rnn")
GOLDEN = {"drafter": 2, "drafter_rnn": 1}  # questions kept, of each number of steps
SAFE_MARGIN = 0.005  # least lead of a chosen or drafted token in a kept answer, in logits


def _answer_shard(job: tuple[str, str | None, list[list[int]], int]) -> list[Trace]:
    """Answers of one worker, in order."""
    folder, drafter, prompts, limit = job
    torch.set_num_threads(1)
    path = Path(folder)
    loop = ReferenceLoop(path / "target", path / drafter if drafter else None)
    return [loop.run(p, limit, tokens.MASK) for p in prompts]


def answer_all(
    folder: Path, drafters: list[str | None], prompts: list[list[int]], limit: int
) -> dict[str | None, list[Trace]]:
    """Traces of every prompt with every drafter (None: plain decoding), from several processes."""
    workers = min(8, multiprocessing.cpu_count())
    jobs = [(str(folder), d, prompts[w::workers], limit) for d in drafters for w in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        shards = pool.map(_answer_shard, jobs, chunksize=1)
    out: dict[str | None, list[Trace]] = {}
    for i, drafter in enumerate(drafters):
        traces: list[Any] = [None] * len(prompts)
        for w in range(workers):
            traces[w::workers] = shards[i * workers + w]
        out[drafter] = traces
    return out


def accuracy(rows: list[dict[str, str]], texts: list[str]) -> dict[str, Any]:
    """Share of answers with the right number, overall and by steps."""
    right: Counter[int] = Counter()
    of: Counter[int] = Counter()
    for row, text in zip(rows, texts, strict=True):
        steps = problems.count_steps(row["answer"])
        of[steps] += 1
        right[steps] += problems.final_number(text) == problems.final_number(row["answer"])
    return {
        "overall": right.total() / of.total(),
        "by_steps": {str(s): f"{right[s]}/{of[s]}" for s in sorted(of)},
    }


def acceptance(traces: list[Trace]) -> dict[str, Any]:
    """Pooled acceptance length, shares of rounds by row, and how good the confidence is."""
    lengths = [n for t in traces for n in t.acceptance_lengths]
    accepted = torch.tensor([n for t in traces for n in t.accepted])[:, None]
    logits = torch.tensor([c for t in traces for c in t.confidence])
    rows = torch.arange(logits.shape[1])
    # A row counts if all rows before it were accepted and it stands before the answer's end.
    ended = torch.tensor([[n == a] for n, a in zip(lengths, accepted.flatten(), strict=True)])
    tried = (accepted > rows) | ((accepted == rows) & ~ended)
    hit = accepted > rows
    sure = logits.sigmoid() * tried
    count = tried.sum(0).clamp(min=1)
    return {
        "acceptance_length": round(sum(lengths) / len(lengths), 4),
        "rounds": len(lengths),
        "accepted_by_row": _rounded(hit.float().mean(0)),
        "accepted_if_reached": _rounded(hit.sum(0) / count),
        "confidence_if_reached": _rounded(sure.sum(0) / count),
    }


def _rounded(x: torch.Tensor) -> list[float]:
    return [round(v, 4) for v in x.tolist()]


def write_golden(
    folder: Path, rows: list[dict[str, str]], traces: dict[str | None, list[Trace]], limit: int
) -> None:
    """Some answers of each number of steps, none with a close call between two tokens."""
    golden: dict[str, Any] = {
        "made_by": "examples/demo/reference_loop.py: float32, CPU, greedy, batch 1",
        "max_new_tokens": limit,
        "fields": (
            "output_ids end with EOS; the first of them comes from the prompt's pass, the others"
            " from rounds; acceptance_lengths: tokens kept of each round, bonus included;"
            " accepted: drafts kept of each round; margin: smallest lead of a chosen token's logit,"
            " and draft_margin of a drafted one;"
            " confidence: logits of all rows of each round, before the sigmoid"
        ),
    }
    for name, quota in GOLDEN.items():
        left = Counter(dict.fromkeys(range(1, problems.MAX_STEPS + 1), quota))
        kept = []
        for i, (row, trace) in enumerate(zip(rows, traces[name], strict=True)):
            steps = problems.count_steps(row["answer"])
            ended = trace.output_ids[-1] == tokens.EOS
            if left[steps] <= 0 or min(trace.margin, trace.draft_margin) < SAFE_MARGIN or not ended:
                continue
            left[steps] -= 1
            entry = asdict(trace)
            entry |= {k: round(entry[k], 5) for k in ("margin", "draft_margin")}
            entry["confidence"] = [[round(x, 5) for x in r] for r in trace.confidence]
            kept.append({"index": i, "question": row["question"], **entry})
        golden[name] = kept
    lines = json.dumps(golden, separators=(",", ":")).replace('{"index"', '\n{"index"')
    (folder / "golden.json").write_text(lines + "\n")


def report(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Measure everything, write the golden answers, return the figures."""
    rows = [json.loads(x) for x in (folder / "heldout.jsonl").read_text().splitlines()]
    rows = rows[: plan["questions"]]
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    prompts = [tokens.chat_prompt(tokenizer, r["question"]) for r in rows]
    limit = plan["max_new_tokens"]
    traces = answer_all(folder, [None, *DRAFTERS], prompts, limit)
    plain = traces[None]
    texts = [tokenizer.decode(t.output_ids) for t in plain]
    results: dict[str, Any] = {
        "questions": len(rows),
        "accuracy_plain": accuracy(rows, texts),
        "ended_by_eos": sum(t.output_ids[-1] == tokens.EOS for t in plain),
        "mean_output_tokens": sum(len(t.output_ids) for t in plain) / len(plain),
        "smallest_margin": min(t.margin for t in plain),
    }
    for name in DRAFTERS:
        same = [a.output_ids == b.output_ids for a, b in zip(plain, traces[name], strict=True)]
        results[name] = {"same_as_plain": sum(same), **acceptance(traces[name])}
    write_golden(folder, rows, traces, limit)
    return results
