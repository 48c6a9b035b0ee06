"""Draws a curve with braille characters: each holds two columns of four dots.

     1.00 ┤             ⢀⣀⠤⠒⠊⠉
          │      ⢀⡠⠔⠒⠉
     0.00 ┤⠤⠤⠒⠒⠉
          └──────────────────
           1               60

Returns plain text. watch_view.py chooses the values and the colours.
"""

from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BARS = "▁▂▃▄▅▆▇█"
_EMPTY = 0x2800


def braille_curve(
    values: Sequence[float],
    *,
    width: int,
    height: int,
    low: float,
    high: float,
    share: float = 1.0,
    begin: float = 0.0,
) -> list[str]:
    """Return `height` lines of `width` characters.

    Args:
        values: Evenly spaced, oldest first.
        width: Width in characters, each two dots wide.
        height: Height in lines, each four dots high.
        low: Value at the bottom dot.
        high: Value at the top dot.
        share: Fraction of the width at which the values end, 0 to 1. A growing share makes the curve grow to the right.
        begin: Fraction of the width at which they begin, below ``share``.
    """
    cells = [[0] * width for _ in range(height)]
    end = max(1, round(2 * width * min(1.0, max(0.0, share))))
    first = min(end - 1, round(2 * width * max(0.0, begin)))
    last: int | None = None
    for column in range(first, end if values else first):
        row = _row(_value_at(values, column - first, end - first), 4 * height, low, high)
        for dot in _dots_between(last, row):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        last = row
    return ["".join(chr(_EMPTY + cell) for cell in line) for line in cells]


def merged(curves: Sequence[Sequence[str]]) -> list[list[tuple[str, int]]]:
    """Return curves of one size on top of each other: for each cell its character and the number of the curve.

    A cell with dots of several curves belongs to the last of them.
    """
    lines: list[list[tuple[str, int]]] = []
    for of_curves in zip(*curves, strict=True):
        line: list[tuple[str, int]] = []
        for cells in zip(*of_curves, strict=True):
            dots = [ord(cell) - _EMPTY for cell in cells]
            owner = max((number for number, its in enumerate(dots) if its), default=0)
            line.append((chr(_EMPTY + _union(dots)), owner))
        lines.append(line)
    return lines


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Return the newest `width` values as bars, scaled so that the largest value has the tallest bar."""
    shown = list(values)[max(0, len(values) - width) :]
    largest = max((abs(value) for value in shown), default=0.0) or 1.0
    return "".join(_BARS[min(7, int(8 * max(0.0, value) / largest))] for value in shown)


def nice_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return lower and upper bounds for the axis: 0 and 1 if all values lie between them, as most rewards do."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.0
    low, high = min(0.0, min(values)), max(values)
    return (low, high) if high > low else (low, low + 1.0)


def _value_at(values: Sequence[float], column: int, columns: int) -> float:
    """Return the mean of the values in a column. If there are fewer values than columns, one value spans several."""
    start = column * len(values) / columns
    stop = (column + 1) * len(values) / columns
    within = values[int(start) : max(int(start) + 1, int(stop))]
    return sum(within) / len(within)


def _dots_between(last: int | None, row: int) -> range:
    """Return the rows to draw in this column. A steep change is drawn as a vertical line."""
    if last is None or last == row:
        return range(row, row + 1)
    return range(row, last) if row < last else range(last + 1, row + 1)


def _row(value: float, rows: int, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return min(rows - 1, max(0, round((1 - share) * (rows - 1))))


def _union(dots: Sequence[int]) -> int:
    """Return the dots of several cells in one."""
    found = 0
    for of_cell in dots:
        found |= of_cell
    return found
