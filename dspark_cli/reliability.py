"""A reliability plot: what survivals promised against what stayed, as an SVG of its own."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Protocol

SIZE, LEFT, TOP = 360, 56, 40
_COLOURS = ("#b45309", "#1d4ed8")


class Point(Protocol):
    """One bin of drafts."""

    @property
    def foreseen(self) -> float:
        """Mean survival."""
        ...

    @property
    def stayed(self) -> float:
        """Share that stayed."""
        ...

    @property
    def count(self) -> int:
        """How many drafts."""
        ...


def plot(title: str, series: Mapping[str, Sequence[Point]]) -> str:
    """The diagonal, and a line for each series; dots grow with the number of drafts.

    Args:
        title: Above it.
        series: Name -> bins; at most two.
    """
    width, height = LEFT + SIZE + 24, TOP + SIZE + 56
    most = max((p.count for bins in series.values() for p in bins), default=1)
    parts = [
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(LEFT, 22, title, "start"),
        f'<path d="M{LEFT} {TOP + SIZE}L{LEFT + SIZE} {TOP}" stroke="#9ca3af" '
        'stroke-dasharray="4 4" fill="none"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#6b7280"/>',
    ]
    for tick in range(6):
        x, y = _at(tick / 5, tick / 5)
        parts.append(_text(x, TOP + SIZE + 18, f"{tick / 5:g}", "middle"))
        parts.append(_text(LEFT - 8, y + 4, f"{tick / 5:g}", "end"))
    parts.append(_text(LEFT + SIZE / 2, TOP + SIZE + 40, "predicted survival", "middle"))
    parts.append(_text(LEFT, TOP - 6, "share that stayed", "start"))
    for n, (name, bins) in enumerate(series.items()):
        colour = _COLOURS[n % len(_COLOURS)]
        points = [(_at(p.foreseen, p.stayed), p.count) for p in bins]
        line = " ".join(f"{x:.1f},{y:.1f}" for (x, y), _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for (x, y), count in points:
            radius = 2 + 5 * (count / most) ** 0.5
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>')
        parts.append(_text(LEFT + SIZE - 8, TOP + SIZE - 14 - 18 * n, name, "end", colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
        + "".join(parts)
        + "</svg>\n"
    )


def _at(x: float, y: float) -> tuple[float, float]:
    return LEFT + SIZE * x, TOP + SIZE * (1 - y)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#111827") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
