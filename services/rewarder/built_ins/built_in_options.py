"""The options of built-in rewards, and the checks of ``reward_kwargs`` against them before a function is called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from shared.near_name import nearest

Kind = Literal["a whole number", "a number", "text", "true or false", "a list of text", "a table"]


@dataclass(frozen=True)
class Option:
    """One option of a built-in reward.

    Args:
        kind: The type, in the words of the error message.
        at_least: Smallest number, inclusive.
        at_most: Largest number, inclusive.
        choices: All allowed texts; any text if empty.
        may_be_empty: Whether a text, or a list and the texts in it, may be empty.
    """

    kind: Kind
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    may_be_empty: bool = True

    def why_not(self, value: object) -> str | None:
        """Return the requirement that ``value`` does not meet, beginning with "must", or None if it meets all."""
        if not self._is_of_kind(value):
            return f"must be {self.kind}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.at_least is not None and value < self.at_least:
                return f"must be at least {self.at_least:g}, and is {value}"
            if self.at_most is not None and value > self.at_most:
                return f"must be at most {self.at_most:g}, and is {value}"
        texts = cast("list[object]", value) if isinstance(value, list) else [value]
        if not self.may_be_empty and ("" in texts or not texts):
            return "must not be empty" if value in ("", []) else "must not have an empty text"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        return None

    def _is_of_kind(self, value: object) -> bool:
        match self.kind:
            case "a whole number":
                return isinstance(value, int) and not isinstance(value, bool)
            case "a number":
                return isinstance(value, int | float) and not isinstance(value, bool)
            case "text":
                return isinstance(value, str)
            case "true or false":
                return isinstance(value, bool)
            case "a list of text":
                return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))
            case "a table":
                return isinstance(value, dict)


def why_not_options(options: Mapping[str, Option], kwargs: Mapping[str, Any]) -> str | None:
    """Return the first problem with ``kwargs``, such as "has no option 'x'", or None if all are valid options."""
    for name, value in kwargs.items():
        option = options.get(name)
        if option is None:
            near = nearest(name, options)
            hint = f" Did you mean '{near}'?" if near else ""
            takes = f"It takes: {', '.join(options)}" if options else "It takes none"
            return f"has no option '{name}'.{hint} {takes}"
        if why_not := option.why_not(value):
            return f"has an option '{name}' that {why_not}"
    return None
