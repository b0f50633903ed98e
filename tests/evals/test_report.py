"""The five files, and the page: self-contained, escaped, well-formed."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine.errors import ConfigError
from evals.charts import bars, histogram, lines, number
from evals.metrics import acceptance
from evals.page import Charts, Code, Fact, Page, Section, Table, Text, render
from evals.report import NAMES, Report, acceptance_section, check_out, write_report
from tests.evals.conftest import Make

VOID = {"meta", "rect", "path", "circle", "polyline"}


class Checker(HTMLParser):
    """Fails on tags that do not nest; collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
        if tag not in VOID or (tag in ("rect", "circle")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(html: str) -> set[str]:
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert checker.links == []
    assert "script" not in checker.seen
    assert "url(" not in html
    return checker.seen


@pytest.fixture
def page(make: Make) -> Page:
    section = acceptance_section(acceptance([make("a", [(3, 3, 4), (3, 1, 2)])]))
    assert section is not None
    charts = Charts(
        [
            bars("b<", ["<i>", "x"], {"<s>": [1.0, None], "t": [0.0, 2.0]}),
            lines("l", {"s": [(1, 3.0), (2, None), (4, 9.0), (8, 7.0)]}, log_x=True),
            histogram("h", {"s": [(1.0, 5), (2.0, 1)], "none": []}, x_label="ms"),
            bars("empty", [], {}),
            lines("empty", {}),
        ]
    )
    blocks = [Text("<b>", warning=True), Table(["<c>"], [["<d>"]]), Code("<e>", "<f>"), charts]
    return Page("<title>", "<lead>", [Fact("<l>", "<v>", "<n>")], [section, Section("<s>", blocks)])


def test_the_page_is_self_contained_and_escaped(page: Page) -> None:
    html = render(page)
    assert {"svg", "table", "details", "figure"} <= check_page(html)
    for text in ("<b>", "<c>", "<d>", "<e>", "<f>", "<lead>", "<i>", "<v>"):
        assert f">{text}<" not in html.replace("<i class", "")
    assert "prefers-color-scheme:dark" in html
    assert "width=device-width" in html


def test_bins_of_a_histogram_are_round_and_take_in_every_sample() -> None:
    # 24 bins up to a p99 of 33.8 were marked 0, 4.23, 8.46, ...
    samples = [(0.4, 500), (33.8, 496), (70.0, 4)]
    html = histogram("h", {"a": samples}, x_label="ms")
    shares = dict(re.findall(r"<title>(\S+) a: (\S+)</title>", html))
    assert list(shares)[:3] == ["0", "2", "4"]
    assert {at: share for at, share in shares.items() if share != "0"} == {
        "0": "50",
        "32": "49.6",
        "more": "0.4",
    }


def test_five_files(page: Page, tmp_path: Path) -> None:
    report = Report(
        kind="eval-x",
        summary={"acc": 0.5},
        per_request=[{"index": 0, "text": "a\u2028b é"}, {"index": 1}],
        matrix=[{"a": 1, "b": "x,y"}, {"b": None, "c": 3}],
        manifest={"command": "dspark"},
        page=page,
    )
    out = tmp_path / "deep" / "out"
    paths = write_report(report, out)
    assert [p.name for p in paths] == list(NAMES)
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert list(summary) == ["schema", "schema_version", "acc"]
    assert summary["schema"] == "dspark/eval-x"
    rows = (out / "per_request.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row)["index"] for row in rows] == [0, 1]
    with (out / "matrix.csv").open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [["a", "b", "c"], ["1", "x,y", ""], ["", "", "3"]]
    assert len(list(out.iterdir())) == 5


def test_reports_of_another_run_are_not_replaced(page: Page, tmp_path: Path) -> None:
    check_out(tmp_path, overwrite=False)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="exists"):
        check_out(tmp_path, overwrite=False)
    check_out(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="cannot make"):
        check_out(tmp_path / "summary.json" / "x", overwrite=True)


def test_numbers() -> None:
    assert [number(x) for x in (0, 0.25, 12.345, 999.6, 12345.6)] == [
        "0",
        "0.25",
        "12.3",
        "1,000",
        "12,346",
    ]
