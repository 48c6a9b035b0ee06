"""The state of a translation of TRL's options, and how an option is taken out of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.run_options.trl_defaults import TRL_DEFAULTS


@dataclass
class Translation:
    """A translation under way.

    Attributes:
        left: TRL's options that were given and are not translated yet.
        run: The run's settings so far.
        notes: Sentences for the user.
        problems: (option, sentence) pairs.
    """

    left: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @classmethod
    def of(cls, trl: Mapping[str, Any]) -> "Translation":
        """Return one that has not begun. Drops nulls that are TRL's default, and reads tables that are JSON texts."""
        given = {
            name: value for name, value in trl.items() if value is not None or TRL_DEFAULTS.get(name, 0) is not None
        }
        return cls({name: _table_of(value) for name, value in given.items()})

    def value(self, name: str) -> Any:
        """Return an option's value, TRL's default if it was not given, and leave it in place."""
        return self.left.get(name, TRL_DEFAULTS.get(name))

    def take(self, name: str) -> Any:
        """Return an option's value, TRL's default if it was not given, and count it as translated."""
        return self.left.pop(name, TRL_DEFAULTS.get(name))

    def take_whole(self, name: str) -> int:
        """Return the value of an option that must be a whole number of at least 1; 0 if it is not, with a problem."""
        value = self.take(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append((name, "must be a whole number of at least 1"))
        return 0

    def drop(self, *names: str, why: str) -> None:
        """Leave options out that were given, with a note."""
        if given := [name for name in names if name in self.left]:
            for name in given:
                del self.left[name]
            self.notes.append(f"{', '.join(given)}: left out; {why}")


def _table_of(value: Any) -> Any:
    """Return the table in a JSON text, which TRL takes for one; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
