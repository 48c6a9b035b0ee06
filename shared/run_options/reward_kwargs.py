"""Extra keyword arguments of reward functions, by function: ``reward_kwargs: {NAME: {ARGUMENT: value}}``.

Values are JSON. They are stored with the run and shown with its settings, so they must not be secrets.
"""

import math
from collections.abc import Collection, Mapping, Sized
from typing import Annotated, Any, cast

from pydantic import Field

from shared.run_options.section import LARGEST

RewardKwargs = dict[str, dict[str, Any]]
RewardName = Annotated[str, Field(max_length=1024)]
MAX_REWARD_FUNCS = 64

GIVEN_ARGUMENTS = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "prompt", "completion"}
)
"""Arguments that every function is given, and columns that are passed on under other names."""
MAX_DEPTH = 32
MAX_CHARACTERS = 256 * 1024
"""Limit for all values of a run together, because they travel with every call."""


def check_reward_kwargs(kwargs: RewardKwargs, reward_funcs: Collection[str]) -> None:
    """Raise ValueError if the names, values or total size of ``reward_kwargs`` are not valid for these functions."""
    strangers = [name for name in kwargs if name not in reward_funcs]
    if strangers:
        raise ValueError(
            f"reward_kwargs has arguments for {_quoted(strangers)}, which is not among reward_funcs; "
            f"these are: {', '.join(reward_funcs)}"
        )
    budget = MAX_CHARACTERS
    for function, arguments in kwargs.items():
        for name, value in arguments.items():
            if not name.isidentifier():
                raise ValueError(f"reward_kwargs of {function}: {name[:100]!r} cannot be the name of an argument")
            if name in GIVEN_ARGUMENTS:
                raise ValueError(f"reward_kwargs of {function}: '{name}' is given to every function; leave it out")
            budget -= _characters(value, where=f"reward_kwargs of {function}: '{name}'")
            if budget < 0:
                raise ValueError(f"reward_kwargs is longer than {MAX_CHARACTERS} characters; put it into a module")


def also_columns(kwargs: Mapping[str, Mapping[str, Any]], columns: Collection[str]) -> list[str]:
    """Return an error message for each function with an argument that is also a column of the dataset."""
    return [
        f"{function} is given {_quoted(doubles)} by reward_kwargs and by the dataset, which has a column of that name; "
        "rename one of them, or choose the columns that go to reward functions with `columns`"
        for function, arguments in kwargs.items()
        if (doubles := [name for name in arguments if name in columns])
    ]


def _characters(value: object, *, where: str) -> int:
    """Return the approximate length of a value as JSON, in characters. Raises ValueError if it is not JSON."""
    pending: list[tuple[object, int]] = [(value, 0)]
    num_characters = 0
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{where} is nested deeper than {MAX_DEPTH}")
        num_characters += 2
        if isinstance(item, dict | list) and len(cast("Sized", item)) > MAX_CHARACTERS // 2:
            return MAX_CHARACTERS + 1
        if isinstance(item, dict):
            table = cast("dict[object, object]", item)
            if not all(isinstance(key, str) for key in table):
                raise ValueError(f"{where} has a table with a key that is not text; put it in quotes")
            pending += [(part, depth + 1) for pair in table.items() for part in pair]
        elif isinstance(item, list):
            pending += [(part, depth + 1) for part in cast("list[object]", item)]
        elif isinstance(item, str):
            num_characters += len(item)
        elif isinstance(item, bool) or item is None:
            continue
        elif isinstance(item, int):
            if abs(item) > LARGEST:
                raise ValueError(f"{where} has a whole number beyond {LARGEST}; write it as text")
        elif not isinstance(item, float) or not math.isfinite(item):
            raise ValueError(f"{where} is not JSON: use text, finite numbers, true, false, null, lists and tables")
    return num_characters


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
