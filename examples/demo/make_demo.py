"""Makes the demo pair from nothing: tokenizer, target, two drafters, held-out problems, report.

    python examples/demo/make_demo.py --out examples/demo

needs one GPU and the packages torch, transformers, tokenizers, safetensors and numpy; no network.
It takes about six minutes on one H200 with 16 CPU cores, half of it training the target.
``--quick`` runs every stage with next to no training, on a CPU, to see that the code works.
``--stages`` runs some of the stages on what lies in the folder already. Seeds, steps, versions,
times and measured results go to RECIPE.json in the output folder.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from examples.demo import problems, tokens
from examples.demo.drafter import DraftShape, save_drafter
from examples.demo.layers import Shape
from examples.demo.report import report
from examples.demo.train_drafter import Rollouts, load_target, make_rollouts, train_drafter
from examples.demo.train_target import save_target, train_target, training_rows

COMMAND = "python examples/demo/make_demo.py --out examples/demo"
STAGES = ("data", "target", "rollouts", "drafter", "drafter_rnn", "report")
TARGET = Shape()
DRAFTERS = {
    "drafter": (
        Shape(layers=2, intermediate=256),
        DraftShape(TARGET.layers, (0, 2, 4), 64, "vanilla", confidence_with_markov=True),
    ),
    "drafter_rnn": (
        Shape(layers=1, intermediate=256),
        DraftShape(TARGET.layers, (-1, 3, 5), 32, "rnn", confidence_with_markov=False),
    ),
}
Plan = dict[str, dict[str, Any]]


def full_plan() -> Plan:
    """Seeds and sizes. ``seconds`` bounds a training; the learning rate then falls faster."""
    # Few steps on purpose: with 1500 the drafter reaches 7.2 of at most 8 tokens a round, and a
    # demo in which nearly every draft is accepted shows little of what a real pair does.
    draft = {
        "seconds": 600,
        "learning_rate": 1.5e-3,
        "warmup": 200,
        "rows": 128,
        "anchors": 24,
        "log_every": 250,
    }
    return {
        "data": {"tokenizer_seed": "tokenizer-0", "tokenizer_rows": 40000, "heldout_seed": 0},
        "target": {
            "seed": 0,
            "documents": 1_600_000,
            "length": 512,
            "shards": 32,
            "rows": 80,
            "steps": 9000,
            "seconds": 1800,
            "learning_rate": 2e-3,
            "warmup": 200,
            "compile": True,
            "log_every": 500,
        },
        "rollouts": {
            "seed": 1,
            "prompts": 96_000,
            "batch": 8000,
            "new_tokens": 128,
            "length": 192,
        },
        "drafter": {"seed": 2, "steps": 500, **draft},
        "drafter_rnn": {"seed": 3, "steps": 1500, **draft},
        "report": {"questions": 200, "max_new_tokens": 256},
    }


def quick_plan() -> Plan:
    plan = full_plan()
    plan["data"]["tokenizer_rows"] = 4000
    plan["target"] |= {"documents": 4000, "shards": 2, "rows": 4, "steps": 24, "warmup": 5}
    plan["target"] |= {"log_every": 6, "length": 256}
    plan["rollouts"] |= {"prompts": 32, "batch": 8, "new_tokens": 64, "length": 192}
    for name in DRAFTERS:
        plan[name] |= {"steps": 20, "warmup": 5, "rows": 4, "anchors": 4, "log_every": 5}
    plan["report"] |= {"questions": 8, "max_new_tokens": 24}
    return plan


def make_data(out: Path, plan: dict[str, Any]) -> None:
    """Tokenizer and held-out problems."""
    tokenizer = tokens.train_tokenizer(plan["tokenizer_seed"], plan["tokenizer_rows"])
    tokens.save_tokenizer(tokenizer, out / "target")
    rows = problems.take(f"heldout-{plan['heldout_seed']}", 200, held_out=True)
    (out / "heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    chats = [
        {"id": f"heldout-{i:04d}", "messages": [{"role": "user", "content": r["question"]}]}
        for i, r in enumerate(rows[:16])
    ]
    (out / "prompts.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))


def make_target(out: Path, plan: dict[str, Any], device: str) -> None:
    rows = training_rows(
        out / "target", plan["documents"], plan["length"], plan["shards"], plan["seed"]
    )
    print(f"{len(rows)} rows of {rows.shape[2]} tokens", flush=True)
    save_target(train_target(rows, TARGET, plan, device), out / "target")


def make_drafter(out: Path, name: str, work: Path, plan: dict[str, Any], device: str) -> None:
    rollouts = Rollouts(*torch.load(work / "rollouts.pt", weights_only=True))
    target = load_target(out / "target", TARGET, device)
    drafter = train_drafter(target, rollouts, DRAFTERS[name], plan)
    save_drafter(drafter, TARGET, out / name)


def run_stage(stage: str, out: Path, work: Path, plan: Plan, device: str) -> dict[str, Any] | None:
    """One stage; the report returns its figures."""
    if stage == "data":
        make_data(out, plan[stage])
    elif stage == "target":
        make_target(out, plan[stage], device)
    elif stage == "rollouts":
        rollouts = make_rollouts(out / "target", plan[stage], device)
        plan[stage]["kept"] = len(rollouts.ids)
        torch.save((rollouts.ids, rollouts.prompt, rollouts.total), work / "rollouts.pt")
    elif stage == "report":
        return report(out, plan[stage])
    else:
        make_drafter(out, stage, work, plan[stage], device)
    return None


def versions(device: str) -> dict[str, str]:
    import numpy
    import safetensors
    import tokenizers
    import transformers

    modules = (torch, transformers, tokenizers, safetensors, numpy)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {m.__name__: m.__version__ for m in modules} | {
        "python": platform.python_version(),
        "gpu": gpu,
    }


def summary(results: dict[str, Any]) -> str:
    """A short table."""
    right = results["accuracy_plain"]
    lines = [f"accuracy {right['overall']:.3f}  by steps {right['by_steps']}"]
    for name in DRAFTERS:
        r = results[name]
        lines.append(
            f"{name:12} acceptance length {r['acceptance_length']:.3f}"
            f"  by row {r['accepted_by_row']}  same as plain {r['same_as_plain']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--work", type=Path, help="folder for what need not be kept")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: all of them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="next to no training")
    args = parser.parse_args()
    out: Path = args.out
    work: Path = args.work or Path(tempfile.gettempdir()) / "dspark-demo"
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_float32_matmul_precision("high")
    path = out / "RECIPE.json"
    recipe: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"stages": {}}
    recipe["command"] = COMMAND
    plan = quick_plan() if args.quick else full_plan()
    for stage in args.stages.split(","):
        began = time.monotonic()
        results = run_stage(stage, out, work, plan, args.device)
        taken = round(time.monotonic() - began, 1)
        print(f"{stage}: {taken} s", flush=True)
        recipe["stages"][stage] = {**plan[stage], "stage_seconds": taken}
        recipe["stages"][stage]["versions"] = versions(args.device)
        if results is not None:
            recipe["results"] = results
        path.write_text(json.dumps(recipe, indent=1) + "\n")
    if "results" in recipe:
        print(summary(recipe["results"]))


if __name__ == "__main__":
    main()
