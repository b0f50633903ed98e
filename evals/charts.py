"""Charts as inline SVG: no script, no font, no file beside them; colours come from the page's CSS.

Every chart is 440 units wide and scales to its column, so that its text stays readable on a phone.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from evals.latency import percentiles

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 12, 44
_SPAN_X, _SPAN_Y = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
NUM_COLOURS = 5


def bars(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    x_label: str = "",
    y_label: str = "",
    y_most: float | None = None,
    values: bool = True,
) -> str:
    """Grouped bars.

    Args:
        title: Above the chart.
        labels: One a group, along the x axis; some are left out where they would collide.
        series: Name -> one value a group; None draws nothing.
        x_label: Under the x axis.
        y_label: Beside the y axis, with its unit.
        y_most: Top of the y axis; by the data if None.
        values: Write values over the bars where there is room.

    Returns:
        A `<figure>`.
    """
    known = [value for column in series.values() for value in column if value is not None]
    top, ticks = _axis(y_most if y_most is not None else max(known, default=0.0))
    step = _SPAN_X / max(len(labels), 1)
    width = min(0.8 * step / max(len(series), 1), 46)
    parts = [*_grid(top, ticks), *_x_labels(labels, step, x_label)]
    for n, (name, column) in enumerate(series.items()):
        for at, value in enumerate(column):
            if value is None:
                continue
            x = _LEFT + (at + 0.5) * step + (n - len(series) / 2) * width
            tall = _SPAN_Y * min(value / top, 1.0)
            tip = escape(f"{labels[at]} {name}: {number(value)}".strip())
            parts.append(
                f'<rect class="f{n % NUM_COLOURS}" x="{x:.1f}" y="{_TOP + _SPAN_Y - tall:.1f}" '
                f'width="{max(width - 1, 0.5):.1f}" height="{tall:.1f}"><title>{tip}</title></rect>'
            )
            if values and width >= 22:
                y = max(_TOP + _SPAN_Y - tall - 4, _TOP + 8)
                parts.append(_text(x + width / 2, y, number(value), "middle", small=True))
    return _figure(title, parts, list(series) if len(series) > 1 else [], y_label)


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
) -> str:
    """Points joined by lines.

    Args:
        title: Above the chart.
        series: Name -> (x, y) in order of x; a None y leaves a gap.
        x_label: Under the x axis.
        y_label: Beside the y axis, with its unit.
        log_x: Doublings of x are equally far apart; the points' own x are the ticks.

    Returns:
        A `<figure>`.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points if y is not None]
    top, ticks = _axis(max(ys, default=0.0))
    scale = (lambda x: math.log2(max(x, 1e-9))) if log_x else float
    low, high = (scale(xs[0]), scale(xs[-1])) if xs else (0.0, 1.0)

    def at_x(x: float) -> float:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + 12 + share * (_SPAN_X - 24)

    parts = _grid(top, ticks)
    marks = xs if log_x else [low + (high - low) * k / 4 for k in range(5)]
    marks = marks[:: math.ceil(len(marks) / 9)] if marks else []
    parts += [_text(at_x(x), HEIGHT - 26, number(x), "middle") for x in marks]
    parts.append(_text(_LEFT + _SPAN_X / 2, HEIGHT - 6, x_label, "middle"))
    for n, (name, points) in enumerate(series.items()):
        parts += _line(name, [(x, at_x(x), y) for x, y in points], top, n % NUM_COLOURS)
    return _figure(title, parts, list(series), y_label)


def _line(
    name: str, points: Sequence[tuple[float, float, float | None]], top: float, colour: int
) -> list[str]:
    parts: list[str] = []
    run: list[str] = []
    for x, px, y in [*points, (0.0, 0.0, None)]:
        if y is None:
            if len(run) > 1:
                parts.append(f'<polyline class="l{colour}" points="{" ".join(run)}"/>')
            run = []
            continue
        py = _TOP + _SPAN_Y * (1 - min(y / top, 1.0))
        run.append(f"{px:.1f},{py:.1f}")
        tip = escape(f"{name} at {number(x)}: {number(y)}")
        parts.append(
            f'<circle class="f{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>{tip}</title>'
            "</circle>"
        )
    return parts


def histogram(
    title: str,
    series: Mapping[str, Sequence[tuple[float, int]]],
    *,
    x_label: str,
    num_bins: int = 24,
) -> str:
    """Shares of samples by value, in equal bins from 0 past the largest p99; the last bin is open.

    Args:
        title: Above the chart.
        series: Name -> (value >= 0, how often).
        x_label: What the values are, with their unit.
        num_bins: Bins up to p99, at most: their width is a round number.

    Returns:
        A `<figure>`.
    """
    found = [p for samples in series.values() if (p := percentiles(samples)) is not None]
    most = max((p.p99 for p in found), default=0.0) or 1.0
    width = _round_up(most / num_bins)
    num_bins = math.floor(most / width) + 1
    shares: dict[str, list[float | None]] = {}
    for name, samples in series.items():
        counts = [0] * (num_bins + 1)
        for value, times in samples:
            counts[min(int(value / width), num_bins)] += times
        total = sum(counts) or 1
        shares[name] = [100 * count / total for count in counts]
    labels = [number(width * k) for k in range(num_bins)] + ["more"]
    return bars(title, labels, shares, x_label=x_label, y_label="% of samples", values=False)


def number(value: float) -> str:
    """At most three significant digits, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _axis(most: float) -> tuple[float, list[float]]:
    """A round top of the y axis, not below `most`, and its ticks."""
    if most <= 0:
        return 1.0, [0.0, 1.0]
    step = _round_up(most / 4)
    count = math.ceil(most / step * 0.9999)
    return step * count, [step * k for k in range(count + 1)]


def _round_up(least: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten; `least` > 0."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= least * 0.999)


def _grid(top: float, ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in ticks:
        y = _TOP + _SPAN_Y * (1 - tick / top)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, number(tick), "end"))
    return parts


def _x_labels(labels: Sequence[str], step: float, x_label: str) -> list[str]:
    longest = max(map(len, labels), default=1)
    every = max(1, math.ceil((7.0 * longest + 6) / step))
    parts = [
        _text(_LEFT + (at + 0.5) * step, HEIGHT - 26, label, "middle")
        for at, label in enumerate(labels)
        if at % every == 0
    ]
    return [*parts, _text(_LEFT + _SPAN_X / 2, HEIGHT - 6, x_label, "middle")]


def _text(x: float, y: float, text: str, anchor: str, *, small: bool = False) -> str:
    size = ' class="small"' if small else ""
    return f'<text{size} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(title: str, parts: Sequence[str], names: Sequence[str], y_label: str) -> str:
    key = "".join(
        f'<span><i class="b{n % NUM_COLOURS}"></i>{escape(name)}</span>'
        for n, name in enumerate(names)
    )
    unit = f'<span class="unit">{escape(y_label)}</span>' if y_label else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="key">{unit}{key}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg></figure>"
    )
