"""Holds the state while TRL's options are translated into the settings of a run."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shared.run_options.grpo_config import NULL_MEANS
from shared.run_options.trl.trl_defaults import TRL_DEFAULTS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: Final[Mapping[str, tuple[Callable[[Any], bool], tuple[str, ...]]]] = {
    "a whole number of at least 1": (
        lambda value: _is_number(value) and isinstance(value, int) and value > 0,
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes", "num_generations"),
            *("steps_per_generation", "generation_batch_size", "num_iterations"),
        ),
    ),
    "a number": (_is_number, ("num_train_epochs", "max_steps", "save_steps", "max_completion_length")),
    "text": (lambda value: isinstance(value, str), ("accelerate_config",)),
    "a list": (lambda value: isinstance(value, list), ("datasets",)),
    "text or a list": (lambda value: isinstance(value, str | list), ("report_to", "reward_funcs")),
    "a table": (lambda value: isinstance(value, dict), ("model_init_kwargs", "vllm")),
}
"""Options whose values are computed with here, by what they must be."""


@dataclass
class Translation:
    """The state of one translation of TRL's options into a run's settings.

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
        """Start a translation. Nulls are left out, because they mean "not set"; values of a wrong type become problems.

        Only the types of options that the translation computes with are checked. The run's own checks report the rest.
        """
        known = TRL_DEFAULTS.keys() | {name for _, names in _KINDS.values() for name in names}
        given = {
            name: _table_of(value)
            for name, value in trl.items()
            if value is not None or name not in known or name in NULL_MEANS
        }
        wrong = {
            name: kind
            for kind, (is_right, names) in _KINDS.items()
            for name in names
            if name in given and not is_right(given[name])
        }
        return cls(
            {name: value for name, value in given.items() if name not in wrong},
            problems=[(name, f"must be {kind}") for name, kind in wrong.items()],
        )

    def value(self, name: str) -> Any:
        """Return an option's value, or TRL's default if it was not given. The option stays in ``left``."""
        return self.left.get(name, TRL_DEFAULTS.get(name))

    def take(self, name: str) -> Any:
        """Return an option's value, or TRL's default if it was not given. The option is removed from ``left``."""
        return self.left.pop(name, TRL_DEFAULTS.get(name))

    def drop(self, *names: str, why: str) -> None:
        """Leave out the options that were given, with one note that ends with the reason ``why``."""
        if given := [name for name in names if name in self.left]:
            for name in given:
                del self.left[name]
            self.notes.append(f"{', '.join(given)}: left out; {why}")


def _table_of(value: Any) -> Any:
    """Return a text that begins with ``{`` parsed as JSON, as TRL does; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
