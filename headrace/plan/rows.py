"""Rows of a plan: a number, its unit and its derivation."""

from dataclasses import dataclass

from headrace.byte_size import sized


@dataclass(frozen=True)
class Row:
    """One number of a plan.

    Args:
        section: The part of the system that the number is about.
        name: The number's name. Section and name are its key in JSON.
        value: The number; None if it is unknown.
        unit: The unit of ``value``, as in JSON.
        how: The formula with its numbers. For an unknown value: which number is missing and how to measure it.
        is_warning: Whether the value is a problem, such as something that does not fit.
    """

    section: str
    name: str
    value: float | None
    unit: str
    how: str
    is_warning: bool = False

    @property
    def shown(self) -> str:
        """The value with its unit, for people; ``?`` if it is unknown."""
        if self.value is None:
            return "?"
        if self.unit == "bytes":
            return sized(self.value)
        if self.value == int(self.value) and abs(self.value) < 1e15:
            return f"{int(self.value):,} {self.unit}".strip()
        return f"{self.value:,.{2 if abs(self.value) < 100 else 0}f} {self.unit}".strip()
