"""Draws a curve with braille characters: each holds two columns of four dots.

     1.00 ┤             ⢀⣀⠤⠒⠊⠉
          │      ⢀⡠⠔⠒⠉
     0.00 ┤⠤⠤⠒⠒⠉
          └──────────────────
           1               60

Plain text in, plain text out; what is drawn and in which colour is watch_view.py's business.
"""

from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BARS = "▁▂▃▄▅▆▇█"
_EMPTY = 0x2800


def braille_curve(
    values: Sequence[float], *, width: int, height: int, low: float, high: float, share: float = 1.0
) -> list[str]:
    """Return `height` lines of `width` characters.

    Args:
        values: Evenly spaced, oldest first.
        width: Characters.
        height: Lines.
        low: Value at the bottom dot.
        high: Value at the top dot.
        share: Part of the width that the values fill, so that a curve grows towards its end.
    """
    cells = [[0] * width for _ in range(height)]
    columns = max(1, round(2 * width * min(1.0, max(0.0, share))))
    last: int | None = None
    for column in range(columns if values else 0):
        row = _row(_value_at(values, column, columns), 4 * height, low, high)
        for dot in _dots_between(last, row):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        last = row
    return ["".join(chr(_EMPTY + cell) for cell in line) for line in cells]


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Return the newest `width` values as bars, the tallest being the largest of them."""
    shown = list(values)[-width:]
    largest = max((abs(value) for value in shown), default=0.0) or 1.0
    return "".join(_BARS[min(7, int(8 * max(0.0, value) / largest))] for value in shown)


def nice_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds that hold all values; 0 and 1 where these fit, as for most rewards."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.0
    low, high = min(0.0, min(values)), max(values)
    return (low, high) if high > low else (low, low + 1.0)


def _value_at(values: Sequence[float], column: int, columns: int) -> float:
    """Return the mean of the values that fall into a column, or the one value that spans it."""
    start = column * len(values) / columns
    stop = (column + 1) * len(values) / columns
    within = values[int(start) : max(int(start) + 1, int(stop))]
    return sum(within) / len(within)


def _dots_between(last: int | None, row: int) -> range:
    """Return the dots of this column: a steep change is a line and not two dots far apart."""
    if last is None or last == row:
        return range(row, row + 1)
    return range(row, last) if row < last else range(last + 1, row + 1)


def _row(value: float, rows: int, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return min(rows - 1, max(0, round((1 - share) * (rows - 1))))
