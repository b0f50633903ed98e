"""`dspark eval lossless`: drafted and plain greedy output, row by row."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_cli.eval_options import EvalOptions, Out
from dspark_cli.eval_run import EvalRun
from dspark_cli.interrupt import StopNow
from dspark_cli.options import EVALUATION, option
from dspark_cli.parameters import as_parameters
from dspark_cli.parsers import real
from dspark_cli.prompt_options import Chat
from dspark_cli.reader import Rows, open_sources
from dspark_cli.rows import RowRules, encode_prompt, read_id, read_row
from dspark_cli.run import FAILED_ROWS, INTERRUPTED
from dspark_cli.sampling_options import MaxTokens, Stop
from engine.errors import ConfigError, RequestError
from engine.request import Request, SamplingParams
from evals.arm import DRAFTED, PLAIN
from evals.gates import EXIT_CODE
from evals.lossless import TIE_BELOW, Kind, Result, Row, compare_all, make_report
from evals.manifest import manifest
from evals.report import write_report

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Rows as `dspark generate` takes them (their sampling is ignored but for max_tokens "
        "and stops), or GSM8K rows, whose question is asked as a user message.",
    ),
]
TieBelow = Annotated[
    float | None,
    option(
        EVALUATION,
        "Logits closer than this may swap. Default: "
        + ", ".join(f"{bound:g} in {name}" for name, bound in TIE_BELOW.items())
        + ".",
        parser=real(0.0),
        metavar="X",
    ),
]


@dataclass(frozen=True, kw_only=True)
class LosslessOptions(EvalOptions):
    """The command's parameters."""

    input: Input
    chat: Chat = False
    tie_below: TieBelow = None
    max_tokens: MaxTokens = 256
    stop: Stop = None
    out: Out = Path("lossless")


def lossless(**values: Any) -> None:
    """Decode the rows of INPUT greedily with and without the drafter, and judge every difference.

    A row's first difference is a tie if both tokens are within a bound of the most likely one in
    the target's logits there (rounding may turn it), else a bug. Exit code 4 on a bug, 3 if a row
    has no output. The same command after a crash or Ctrl-C goes on where it was.
    """
    given = LosslessOptions(**values)
    if given.model is not None and given.draft_name() is None:
        raise ConfigError("there is no drafter to compare with", "give --draft")
    raise typer.Exit(_run(given))


as_parameters(lossless, LosslessOptions)


def _run(given: LosslessOptions) -> int:
    rows = Rows(open_sources(given.input), given.limit)
    what = {
        "command": "eval lossless",
        "input": given.input,
        "max_tokens": given.max_tokens,
        "stop": list(given.stop or ()),
        "chat": given.chat,
    }
    run = EvalRun(given, given.out, given.overwrite, what)
    requests, refused = _requests(given, run, rows)
    try:
        arms = run.arms(requests, (DRAFTED, PLAIN))
    except StopNow:
        sys.stderr.write(
            f"dspark: interrupted; what ended is kept in {given.out}: run the same command again "
            "to go on\n"
        )
        return INTERRUPTED
    engine = run.engine
    dtype = str(engine.config.dtype)
    bound = TIE_BELOW.get(dtype, 0.0) if given.tie_below is None else given.tie_below
    judged = compare_all([r.request_id for r in requests], arms, engine.top_logits, bound)
    result = Result(
        rows=[*judged, *refused],
        arms=arms,
        dtype=dtype,
        bound=bound,
        name=given.input,
        model=str(given.model),
        draft=str(run.config.draft),
        token_text=lambda token: run.tokenizer.decode([token]),
        manifest=manifest(
            settings=run.settings,
            inputs={"rows": {"name": given.input, "read": rows.read, "sha256": rows.sha256}},
            device=str(engine.config.device),
        ),
    )
    write_report(make_report(result), given.out)
    run.say(result.verdict())
    for row in result.differing[:20]:
        run.say(f"row {row.row_id}, output token {row.position}: {row.kind.value}, {row.why}")
    run.say(f"wrote {given.out / 'report.html'} and the files beside it")
    if result.count(Kind.bug):
        return EXIT_CODE
    return FAILED_ROWS if result.count(Kind.error) else 0


def _requests(given: LosslessOptions, run: EvalRun, rows: Rows) -> tuple[list[Request], list[Row]]:
    """Greedy requests, and the rows that give none."""
    params = SamplingParams(max_tokens=given.max_tokens, stop=tuple(given.stop or ()))
    rules = RowRules(
        params=params, chat=given.chat, template_kwargs=run.template_kwargs, passthrough=True
    )
    found: dict[str, Request] = {}
    refused: list[Row] = []
    for raw in rows:
        name = str(raw.index)
        try:
            fields = raw.load()
            own = read_id(fields)
            name = name if own is None else str(own)
            if name in found:
                raise RequestError("duplicate_id", f"the id {name!r} was used before", "change it")
            if isinstance(fields.get("question"), str) and "prompt" not in fields:
                fields = {"messages": [{"role": "user", "content": fields["question"]}]}
            row = read_row(fields, rules)
            if row.prompt.later:
                raise RequestError("unsupported", "the row has several turns", "keep the first")
            ids = encode_prompt(row.prompt, run.tokenizer, run.template)
        except RequestError as error:
            refused.append(Row(name, Kind.error, why=f"{error.kind}: {error}"))
            continue
        greedy = replace(row.params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
        found[name] = Request(request_id=name, prompt_token_ids=ids, params=greedy)
    if not found and not refused:
        raise ConfigError(f"no rows in {given.input}", "write one JSON object a line")
    return list(found.values()), refused
