"""Tables as Markdown, aligned so that they also read well as plain text."""

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is aligned left, the others right.

    Args:
        columns: Headings.
        rows: Cells, as many as there are columns.

    Returns:
        Lines, each ended by a line break.
    """
    cells = [list(columns), *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    rule = [f"{'-' * (width - 1)}:" if at else "-" * width for at, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        padded = [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |\n")
    return "".join(lines)
