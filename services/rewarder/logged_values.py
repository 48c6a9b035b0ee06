"""Collects the values that a reward function logs in one call, with TRL's ``log_metric`` and ``log_extra``.

    log_metric("accuracy", 0.5)            one number for the call; several of one name are averaged, as in TRL
    log_extra("parsed", ["5", None, ...])  one value per completion, for tables and the rollout log

A mistake in logging does not make a reward fail: a value that cannot be kept is left out, and so is every name after
32 others. Values of log_extra that are neither finite numbers nor None become text of at most 500 characters.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import cast

_MAX_NAMES, _MAX_NAME, _MAX_TEXT = 32, 100, 500


class LoggedValues:
    """The values that a reward function logged in one call."""

    def __init__(self) -> None:
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._extra: defaultdict[str, list[str | float | None]] = defaultdict(list)

    def log_metric(self, name: str, value: object) -> None:
        """Keep a number for the whole call. A value that is not a finite number is ignored."""
        number = _number(value)
        if number is not None and _fits(name, self._metrics):
            self._metrics[name].append(number)

    def log_extra(self, column: str, values: object) -> None:
        """Keep one value per completion. None means no value for that completion."""
        if isinstance(values, Iterable) and _fits(column, self._extra):
            with contextlib.suppress(Exception):  # of the user's iterator
                self._extra[column] += [*map(_value, cast("Iterable[object]", values))]

    def metrics(self) -> dict[str, float]:
        """Return, by name, the mean of the numbers that were logged with ``log_metric``."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def extra_of(self, number: int) -> dict[str, str | float]:
        """Return the values logged with ``log_extra`` for the completion at index ``number``, by column."""
        own = {name: values[number] for name, values in self._extra.items() if number < len(values)}
        return {name: value for name, value in own.items() if value is not None}


def _fits(name: object, known: dict[str, list[float]] | dict[str, list[str | float | None]]) -> bool:
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_NAME
    return is_name and (name in known or len(known) < _MAX_NAMES)


def _number(value: object) -> float | None:
    try:
        number = float(cast("float", value))
    except Exception:  # noqa: BLE001  of the user's __float__
        return None
    return number if math.isfinite(number) else None


def _value(value: object) -> str | float | None:
    if value is None:
        return None
    number = None if isinstance(value, (str, bytes)) else _number(value)
    if number is not None:
        return number
    try:
        # Half of a surrogate pair, as in text cut by a program, cannot be encoded.
        return str(value)[:_MAX_TEXT].encode(errors="replace").decode()
    except Exception:  # noqa: BLE001  of the user's __str__
        return None
