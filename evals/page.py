"""One self-contained HTML page: no script, nothing fetched, light and dark, readable on a phone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from evals.charts import NUM_COLOURS

_LIGHT = ("#2563c9", "#c2560c", "#17794a", "#7646bd", "#a3324e")
_DARK = ("#82b1ff", "#ffab70", "#6fd39b", "#c3a5ff", "#ff9db1")


@dataclass(frozen=True, slots=True)
class Fact:
    """A headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """Cells hold words, aligned left; else numbers, aligned right but for the first column."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; a `warning` stands out."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Text as it is; `summary` folds it away under that line."""

    text: str
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Charts:
    """Figures of evals.charts, side by side where there is room."""

    figures: Sequence[str]


Block = Table | Text | Code | Charts


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Page:
    """What `report.html` shows."""

    title: str
    lead: str = ""
    """One sentence: what ran on what."""

    facts: Sequence[Fact] = ()
    sections: Sequence[Section] = field(default_factory=tuple)


def render(page: Page) -> str:
    """The page as HTML; every text is escaped."""
    body = [f"<h1>{escape(page.title)}</h1>"]
    if page.lead:
        body.append(f'<p class="lead">{escape(page.lead)}</p>')
    if page.facts:
        body.append('<dl class="facts">' + "".join(map(_fact, page.facts)) + "</dl>")
    for section in page.sections:
        blocks = "".join(map(_block, section.blocks))
        body.append(f"<section><h2>{escape(section.title)}</h2>{blocks}</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(page.title)}</title><style>{_css()}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _fact(fact: Fact) -> str:
    note = f'<dd class="note">{escape(fact.note)}</dd>' if fact.note else ""
    return f"<div><dt>{escape(fact.label)}</dt><dd>{escape(fact.value)}</dd>{note}</div>"


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p{' class=warning' if block.warning else ''}>{escape(block.text)}</p>"
    if isinstance(block, Charts):
        return f'<div class="charts">{"".join(block.figures)}</div>'
    if isinstance(block, Code):
        code = f'<pre tabindex="0">{escape(block.text)}</pre>'
        if not block.summary:
            return code
        return f"<details><summary>{escape(block.summary)}</summary>{code}</details>"
    return _table(block)


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    kind = ' class="words"' if table.words else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table{kind}>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _css() -> str:
    light = "".join(f"--c{n}:{colour};" for n, colour in enumerate(_LIGHT))
    dark = "".join(f"--c{n}:{colour};" for n, colour in enumerate(_DARK))
    series = "".join(
        f".f{n}{{fill:var(--c{n})}}.l{n}{{stroke:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
        for n in range(NUM_COLOURS)
    )
    return _STYLE.replace("/*light*/", light).replace("/*dark*/", dark) + series


_STYLE = """
:root{--ink:#1a1d21;--dim:#59616b;--line:#d8dde3;--page:#fff;--card:#f5f7f9;--warn:#fdf1d8;
--warn-line:#c98a00;--shade:#0003;/*light*/}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--dim:#a3acb7;--line:#39414b;
--page:#14171b;--card:#1d2228;--warn:#352a10;--warn-line:#d9a320;--shade:#fff4;/*dark*/}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.15rem;margin:36px 0 8px;padding-top:12px;border-top:1px solid var(--line)}
p{margin:8px 0;max-width:75ch;overflow-wrap:anywhere}
.lead{color:var(--dim)}
.warning{background:var(--warn);border-left:4px solid var(--warn-line);padding:8px 12px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;
margin:20px 0}
.facts div{background:var(--card);border-radius:8px;padding:10px 12px;min-width:0}
.facts dt{color:var(--dim);font-size:.85rem}
.facts dd{margin:0;font-size:1.45rem;font-weight:600;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.facts .note{font-size:.8rem;font-weight:400;color:var(--dim)}
.scroll{overflow-x:auto;margin:12px 0;background:
linear-gradient(90deg,var(--page) 40%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--page) 40%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/14px 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/14px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--dim);padding:4px 0}
th,td{padding:5px 14px 5px 0;text-align:right;vertical-align:top;border-bottom:1px solid
var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:600}
th:first-child,td:first-child{text-align:left}
td:first-child{white-space:normal;min-width:7em}
.words th,.words td{text-align:left}
.words td:last-child{white-space:normal;min-width:15em;overflow-wrap:anywhere}
pre{background:var(--card);border-radius:8px;padding:12px;overflow-x:auto;font-size:.85rem;
line-height:1.45;white-space:pre-wrap;overflow-wrap:anywhere}
details{margin:12px 0}summary{cursor:pointer}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:24px}
figure{margin:8px 0;min-width:0}
figcaption{font-weight:600}
.key{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:.85rem;color:var(--dim);min-height:1.5em}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
svg{display:block;width:100%;height:auto;max-width:560px}
svg text{fill:var(--dim);font-size:13px}
svg .small{font-size:12px;fill:var(--ink)}
.grid{stroke:var(--line);stroke-width:1}
polyline{fill:none;stroke-width:2}
@media (max-width:480px){table{font-size:.82rem}th,td{padding-right:9px}th{white-space:normal}
td:first-child{min-width:5em}}
"""
