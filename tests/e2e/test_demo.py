"""The packaged pair, through the engine and through the command."""

import json
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Request, SamplingParams
from tests.helpers.command import Command, run_command
from tests.helpers.engines import complete, make_engine, outputs, randomise, record_drafts

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
LIMITS: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512, "kv_block_size": 16}


def heldout() -> list[dict[str, str]]:
    return [json.loads(x) for x in (DEMO / "heldout.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", ["drafter", "drafter_rnn"])
def test_golden_rounds(name: str) -> None:
    """Ids, accepted drafts and confidences of the slow loop in examples/demo/reference_loop.py."""
    golden = json.loads((DEMO / "golden.json").read_text("utf-8"))[name]
    engine = make_engine(DEMO / "target", DEMO / name, **LIMITS)
    for q in golden:
        seen = record_drafts(engine)
        params = SamplingParams(max_tokens=256)
        one = Request(request_id="q", prompt_token_ids=tuple(q["prompt_ids"]), params=params)
        (done,) = complete(engine, [one]).values()
        assert list(done.token_ids) == q["output_ids"]
        assert [r.committed for r in done.rounds] == q["acceptance_lengths"]
        # the last round may be shorter than a block: its confidences are all there nevertheless
        got = torch.stack([c for _, _, c in seen[: len(q["confidence"])] if c is not None])
        torch.testing.assert_close(got, torch.tensor(q["confidence"]), atol=2e-3, rtol=0)


def test_rule_3_sampled_frequencies_agree() -> None:
    """Temperature 1, 800 samples a way: two-sample chi-square at every position.

    Drafted with every draft verified, and with any budget at all and plain rounds between, against
    plain. 2 x 8 positions, each refused below p = 1e-4: a right sampler fails with odds below 2e-3,
    once and for all, as its noise is keyed.
    """
    samples, length = 800, 8
    row = min(heldout(), key=lambda r: len(r["question"]))
    counts = []
    for way in ("plain", "drafted", "scheduled"):
        draft = None if way == "plain" else DEMO / "drafter"
        engine = make_engine(DEMO / "target", draft, **{**LIMITS, "max_num_seqs": 64})
        if way == "scheduled":
            randomise(engine, 2)
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": row["question"]}])
        many = [
            Request(
                request_id=f"{way} {i}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True),
            )
            for i in range(samples)
        ]
        ids = torch.tensor(list(outputs(engine, many).values()))
        counts.append([torch.bincount(ids[:, k], minlength=1024) for k in range(length)])
        if way == "drafted":
            assert engine.stats.accepted > samples, "the test needs accepted drafts"
            assert engine.stats.accepted < engine.stats.drafted - samples / 2, "and rejections"
        if way == "scheduled":
            assert min(engine.stats.schedule.rounds.values()) > 3
    plain, *others = counts
    for other in others:
        both = [two_sample_chi_square(a, b) for a, b in zip(other, plain, strict=True)]
        assert all(p_value > 1e-4 for p_value, _ in both)
        assert sum(cells > 1 for _, cells in both) >= 5


def test_the_chi_square_sees_a_small_bias() -> None:
    """Negative control: a tenth of one token's frequency moved, at 6000 samples."""
    a = torch.tensor([750, 400, 350])
    assert two_sample_chi_square(a, torch.tensor([740, 410, 350]))[0] > 0.1
    assert two_sample_chi_square(a * 4, torch.tensor([3340, 1360, 1300]))[0] < 1e-4


def two_sample_chi_square(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """P value and the number of cells, tokens seen fewer than 20 times pooled into one."""
    common = (a + b) >= 20
    x = torch.cat((a[common], a[~common].sum()[None])).double()
    y = torch.cat((b[common], b[~common].sum()[None])).double()
    keep = (x + y) >= 20
    x, y = x[keep], y[keep]
    if len(x) < 2:
        return 1.0, len(x)
    statistic = ((x - y).square() / (x + y)).sum()
    half = torch.tensor((len(x) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2)), len(x)


KILLS = int(os.environ.get("DSPARK_KILLS", "3"))
COMMAND = [
    *("generate", "in.jsonl", "--model", "demo", "--device", "cpu", "--threads", "1"),
    # how much each round verifies depends on who shares it, and `spec` would tell
    *("--max-num-seqs", "3", "--verify", "all"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl, enough rows for the kills, and whole.jsonl, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [
        {"id": i, "messages": [{"role": "user", "content": r["question"]}]}
        for i, r in enumerate((heldout() * 2)[: 27 * max(KILLS, 3)])
    ]
    (folder / "in.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    done = run_command(*COMMAND, "-o", "whole.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_bars_of_the_pair(whole: Path) -> None:
    """Problems it has not seen, every draft verified: accuracy >= 90 %, acceptance length >= 4.

    All 200 of them, drafted == plain: evals/test_demo_eval.py.
    """
    done = [json.loads(x) for x in (whole / "whole.jsonl").read_text("utf-8").splitlines()]
    right = sum(
        row["text"].split("####")[-1].strip() == asked["answer"].split("####")[1].strip()
        for row, asked in zip(done, heldout() * 2, strict=False)
    )
    assert right >= 0.9 * len(done) > 70
    rounds = sum(row["spec"]["rounds"] for row in done)
    tokens = sum(row["spec"]["rounds"] * row["spec"]["acceptance_length"] for row in done)
    assert tokens / rounds >= 4.0


def test_killed_at_random_moments(whole: Path) -> None:
    """kill -9 three times, or DSPARK_KILLS times, then to the end: as if never killed."""
    rng, kills, finished = random.Random(4), 0, 0
    journal = whole / "killed.journal"
    for _ in range(KILLS):
        with Command(*COMMAND, "-o", "killed.jsonl", cwd=whole) as process:
            size = journal.stat().st_size if journal.exists() else 0
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if journal.exists() and journal.stat().st_size > size:
                    break  # it has begun to finish rows
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 0.4))
            kills += process.poll() is None
        lines = journal.read_bytes().count(b"\n")
        assert lines >= finished, "a finished row was lost"
        finished = lines
    assert 2 * kills >= KILLS, "the runs were too short to be killed"
    last = run_command(*COMMAND, "-o", "killed.jsonl", cwd=whole)
    assert last.returncode == 0, last.stderr
    assert (whole / "killed.jsonl").read_bytes() == (whole / "whole.jsonl").read_bytes()


def test_demo_from_an_installed_wheel(tmp_path: Path) -> None:
    """The wheel alone, unpacked elsewhere: `--model demo` finds the pair inside it."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "in.jsonl").write_text('{"prompt": "Tom has 3 apples."}\n')
    code = (
        "import sys; from importlib.resources import files; from dspark_cli.main import run;"
        "sys.stderr.write(str(files('dspark_demo')) + chr(10));"
        "run(['generate', 'in.jsonl', '-o', '-', '--model', 'demo', '--max-tokens', '8',"
        " '--device', 'cpu', '--threads', '1', '--verify', 'all'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] >= 1


def test_packages_listed_are_the_packages_there() -> None:
    """pyproject lists packages by hand, because the demo pair is mapped in from examples/."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for top in ("dspark_cli", "engine", "evals")
        for p in (ROOT / top).rglob("__init__.py")
    }
    assert {p for p in listed if not p.startswith("dspark_demo")} == found
