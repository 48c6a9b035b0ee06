"""Draws a curve with braille characters: each holds two columns of four dots.

     1.00 ┤             ⢀⣀⠤⠒⠊⠉
          │      ⢀⡠⠔⠒⠉
     0.00 ┤⠤⠤⠒⠒⠉
          └──────────────────
           1               60

Returns plain text. watch_view.py chooses the values and the colours.
"""

import itertools
from collections.abc import Iterator, Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BARS = "▁▂▃▄▅▆▇█"
_EMPTY = 0x2800
_LETTER_EVERY = 12
"""Columns from one letter on a curve to its next."""


def braille_curve(
    points: Sequence[tuple[float, float]],
    *,
    width: int,
    height: int,
    low: float,
    high: float,
    first: float,
    last: float,
) -> list[str]:
    """Draw a curve as `height` lines of `width` braille characters.

    A straight line joins each point with the next. Where a column of dots has several points, it shows their mean.

    Args:
        points: Steps and values, in the order of steps.
        width: Width in characters, each two dots wide.
        height: Height in lines, each four dots high.
        low: Value at the bottom dot.
        high: Value at the top dot.
        first: Step at the left edge.
        last: Step at the right edge.
    """
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in _joined(_by_column(points, 2 * width, first, last)):
        row = _row(value, 4 * height, low, high)
        for dot in _dots_between(before, row):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    return ["".join(chr(_EMPTY + cell) for cell in line) for line in cells]


def merged(curves: Sequence[Sequence[str]], letters: Sequence[str] = ()) -> list[list[tuple[str, int]]]:
    """Overlay curves of equal size. Return the lines of cells, each a character and the number of the cell's curve.

    A cell with dots of several curves gets the last one's number. Each curve is marked every few columns with its
    letter from ``letters``. Curves that begin together have their letters in different columns.
    """
    lines: list[list[tuple[str, int]]] = []
    for of_curves in zip(*curves, strict=True):
        line: list[tuple[str, int]] = []
        for cells in zip(*of_curves, strict=True):
            dots = [ord(cell) - _EMPTY for cell in cells]
            owner = max((number for number, its in enumerate(dots) if its), default=0)
            line.append((chr(_EMPTY + _union(dots)), owner))
        lines.append(line)
    for number, letter in enumerate(letters):
        columns = [found for found in _cells_of_columns(curves[number]) if found]
        every = min(max(_LETTER_EVERY, len(letters)), len(columns))
        for its_cells in columns[(2 * number + 1) * every // (2 * len(letters)) :: max(1, every)]:
            row, column = its_cells[len(its_cells) // 2]
            lines[row][column] = (letter, number)
    return lines


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Return the newest `width` values as bars, scaled so that the largest value has the tallest bar."""
    shown = list(values)[max(0, len(values) - width) :]
    largest = max((abs(value) for value in shown), default=0.0) or 1.0
    return "".join(_BARS[min(7, int(8 * max(0.0, value) / largest))] for value in shown)


def nice_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the axis's bounds: 0 and 1 if all values lie there, else min(0, lowest value) and the highest value."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.0
    low, high = min(0.0, min(values)), max(values)
    return (low, high) if high > low else (low, low + 1.0)


def _by_column(
    points: Sequence[tuple[float, float]], columns: int, first: float, last: float
) -> list[tuple[int, float]]:
    """Map points to columns of dots. Return each column that has points, with the mean of their values."""
    found: dict[int, list[float]] = {}
    for step, value in points:
        share = (step - first) / (last - first) if last > first else 0.0
        found.setdefault(min(columns - 1, max(0, round(share * (columns - 1)))), []).append(value)
    return [(column, sum(values) / len(values)) for column, values in found.items()]


def _joined(means: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """Yield every column from the first to the last of ``means``, with values on straight lines between them."""
    yield from means[:1]
    for (left, begin), (right, end) in itertools.pairwise(means):
        for column in range(left + 1, right + 1):
            yield column, begin + (end - begin) * (column - left) / (right - left)


def _dots_between(last: int | None, row: int) -> range:
    """Return the rows of dots to set in a column. A steep change since the last column becomes a vertical line."""
    if last is None or last == row:
        return range(row, row + 1)
    return range(row, last) if row < last else range(last + 1, row + 1)


def _row(value: float, rows: int, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return min(rows - 1, max(0, round((1 - share) * (rows - 1))))


def _cells_of_columns(curve: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return a list for each column of a curve, with the (row, column) of the cells that have dots."""
    columns = range(len(curve[0]))
    return [[(row, column) for row, line in enumerate(curve) if ord(line[column]) != _EMPTY] for column in columns]


def _union(dots: Sequence[int]) -> int:
    """Combine the bit masks of several cells' dots into one."""
    found = 0
    for of_cell in dots:
        found |= of_cell
    return found
