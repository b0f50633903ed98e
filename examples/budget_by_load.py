"""How much is verified as the load rises: `dspark generate` at several batch sizes, and a plot.

    python examples/budget_by_load.py                       # the packaged pair on a CPU
    python examples/budget_by_load.py --prompts GSM8K_TEST.jsonl --requests 1,8,32,64,128,256 \\
        -- --model SMOLLM2 --draft DRAFTER
    python examples/budget_by_load.py --metrics m1.json m8.json   # of runs with --metrics-json
    python examples/budget_by_load.py --redraw              # from the figures of the last time

Writes OUT.json, the figures, and OUT.svg. The budget is the draft tokens verified a request and
round, plain rounds included. What follows `--` are options of `dspark generate`.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 300, 48, 44, 16, 48


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=HERE / "demo" / "heldout.jsonl")
    parser.add_argument("--requests", default="1,2,4,8,16,32,64", help="batch sizes")
    parser.add_argument("--per-batch", type=int, default=3, help="rows per request at once")
    parser.add_argument("--metrics", type=Path, nargs="+", help="of runs that were made before")
    parser.add_argument("--redraw", action="store_true", help="from OUT.json")
    parser.add_argument("--out", type=Path, default=HERE / "reports" / "budget_by_load")
    return parser.parse_args(argv[:at]), argv[at + 1 :]


def run(given: argparse.Namespace, options: list[str], num_seqs: int, folder: Path) -> Path:
    """Decode rows with `num_seqs` at once; the run's metrics."""
    lines = given.prompts.read_text("utf-8").splitlines()
    rows = []
    for i in range(max(given.per_batch * num_seqs, 16)):
        row = json.loads(lines[i % len(lines)])
        messages = row.get("messages") or [{"role": "user", "content": row["question"]}]
        rows.append(json.dumps({"id": i, "messages": messages}))
    source, metrics = folder / f"{num_seqs}.jsonl", folder / f"{num_seqs}.json"
    source.write_text("\n".join(rows))
    command = [sys.executable, "-m", "dspark_cli", "generate", str(source)]
    command += ["-o", str(folder / f"{num_seqs}.out.jsonl"), "--metrics-json", str(metrics)]
    command += ["--no-enable-prefix-caching", "--max-num-seqs", str(num_seqs)]
    subprocess.run([*command, *(options or ["--model", "demo", "--threads", "1"])], check=True)
    return metrics


def point(metrics: dict[str, Any]) -> dict[str, Any]:
    """What the plot needs of one run."""
    done, settings = metrics["schedule"], metrics["manifest"]["settings"]
    rounds = done["rounds_by_path"]
    return {
        "requests": settings["max_num_seqs"],
        "budget": done["drafts_verified_per_request_round"],
        "gamma": settings["num_speculative_tokens"],
        "plain_rounds": rounds["plain"] / sum(rounds.values()),
        "acceptance_length": (metrics["acceptance"] or {}).get("acceptance_length"),
        "tokens_per_second": metrics["speed"]["output_tokens_per_second"],
        "device": settings["device"],
        "target": Path(settings["model_name"]).name,
        "verify": settings["verify"],
    }


def draw(points: list[dict[str, Any]]) -> str:
    """An SVG of its own: budget over requests, doublings equally far apart."""
    gamma = points[0]["gamma"]
    low, high = (math.log2(points[i]["requests"]) for i in (0, -1))

    def at(requests: float, budget: float) -> tuple[float, float]:
        share = (math.log2(requests) - low) / (high - low) if high > low else 0.5
        x = LEFT + 16 + share * (WIDTH - LEFT - RIGHT - 32)
        return x, HEIGHT - BOTTOM - budget / gamma * (HEIGHT - TOP - BOTTOM)

    title = f"drafts verified per request and round, of {gamma}; --verify {points[0]['verify']}"
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', text(LEFT, 22, title)]
    for tick in range(gamma + 1):
        _, y = at(points[0]["requests"], tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(text(LEFT - 8, y + 4, str(tick), "end"))
    for p in points:
        x, y = at(p["requests"], p["budget"])
        parts.append(text(x, HEIGHT - BOTTOM + 18, str(p["requests"]), "middle"))
        parts.append(text(x, y - 9, f"{p['budget']:.1f}", "middle"))
        tip = f"{p['requests']} requests: {p['budget']:.2f}, {p['tokens_per_second']:.0f} tokens/s"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1d4ed8"><title>{escape(tip)}</title>'
            "</circle>"
        )
    line = " ".join("{:.1f},{:.1f}".format(*at(p["requests"], p["budget"])) for p in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1d4ed8" stroke-width="2"/>')
    where = f"requests at once ({points[0]['target']}, {points[0]['device']})"
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, where, "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="13">' + "".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#111827">{escape(words)}'
        "</text>"
    )


def main() -> None:
    given, options = parse(sys.argv[1:])
    figures = given.out.with_suffix(".json")
    if given.redraw:
        points = json.loads(figures.read_text("utf-8"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            sizes = [] if given.metrics else [int(n) for n in given.requests.split(",")]
            files = given.metrics or [run(given, options, n, Path(folder)) for n in sizes]
            points = [point(json.loads(f.read_text("utf-8"))) for f in files]
        points.sort(key=lambda p: p["requests"])
        figures.write_text(json.dumps(points, indent=1) + "\n")
    given.out.with_suffix(".svg").write_text(draw(points))
    for p in points:
        print(f"{p['requests']:4} requests: {p['budget']:.2f} drafts verified of {p['gamma']}")


if __name__ == "__main__":
    main()
