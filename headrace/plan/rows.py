"""A plan as rows: a number with its unit, and where it comes from."""

from dataclasses import dataclass

from headrace.byte_size import sized


@dataclass(frozen=True)
class Row:
    """One number of a plan.

    Args:
        section: What it is about.
        name: Of the number; with the section, its key in JSON.
        value: The number; None if it is not known.
        unit: Of the value, as in JSON.
        how: The formula with its numbers in it; or, of an unknown one, which number is missing and how to measure it.
        is_warning: Whether something does not fit.
    """

    section: str
    name: str
    value: float | None
    unit: str
    how: str
    is_warning: bool = False

    @property
    def shown(self) -> str:
        """The value as people read it."""
        if self.value is None:
            return "?"
        if self.unit == "bytes":
            return sized(self.value)
        if self.value == int(self.value) and abs(self.value) < 1e15:
            return f"{int(self.value):,} {self.unit}".strip()
        return f"{self.value:,.{2 if abs(self.value) < 100 else 0}f} {self.unit}".strip()
