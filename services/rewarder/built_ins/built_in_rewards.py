"""The table of built-in reward functions, with the names that TRL and open-r1 use where they have the same function.

Importing this module is cheap: a function and its dependencies are imported when a worker first needs them.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.rewarder.built_ins.built_in_options import Option, why_not_options
from services.rewarder.reward_call import RewardFunction
from shared.errors import UserError
from shared.near_name import nearest
from shared.user_code import function_loading

_PACKAGE = "services.rewarder.built_ins"
_GOLD = (("solution", "answer"),)


@dataclass(frozen=True)
class BuiltIn:
    """One built-in reward function.

    Args:
        place: ``module:function`` in the package built_ins.
        summary: One line for people.
        columns: The dataset needs one column from each inner tuple, unless ``reward_kwargs`` has it.
        options: The options that ``reward_kwargs`` may set.
        check: ``module:function`` that checks further, for example whether a sandbox works; None for no further check.
    """

    place: str
    summary: str
    columns: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    check: str | None = None

    def load(self) -> RewardFunction:
        """Import the built-in's module, and return the function."""
        return _imported(self.place)

    def not_from_columns(self) -> frozenset[str]:
        """Return the options that are never read from a column of the same name."""
        return frozenset(self.options) - {name for choice in self.columns for name in choice}

    def why_not(self, kwargs: Mapping[str, Any]) -> str | None:
        """Return the problem with these options, or None. Checks only their types and ranges, and imports nothing."""
        return why_not_options(self.options, kwargs)

    def why_not_usable(self, kwargs: Mapping[str, Any]) -> str | None:
        """Return the reason why the function cannot be used with these options, or None.

        Unlike ``why_not``, it imports the modules that the function needs, which may take a second.
        """
        why_not = self.why_not(kwargs)
        if why_not is None and self.check is not None:
            check: Callable[[Mapping[str, Any]], str | None] = _imported(self.check)
            why_not = check(kwargs)
        return why_not


BUILT_INS: dict[str, BuiltIn] = {
    "accuracy_reward": BuiltIn(
        "accuracy:accuracy_reward",
        "1.0 if the completion's LaTeX answer equals the gold answer, 0.0 if not (math-verify)",
        _GOLD,
    ),
    "reasoning_accuracy_reward": BuiltIn(
        "reasoning_accuracy:reasoning_accuracy_reward",
        "accuracy_reward of the text after the reasoning; 0.0 if the reasoning does not end",
        _GOLD,
        {"reasoning_delimiters": Option("a list of text", may_be_empty=False)},
    ),
    "numeric_match_reward": BuiltIn(
        "numeric_match:numeric_match_reward",
        "1.0 if the number that the completion announces, or ends with, is the gold number, 0.0 if not",
        _GOLD,
        {
            "tolerance": Option("a number", at_least=0),
            "relative_tolerance": Option("a number", at_least=0),
            "announced_only": Option("true or false"),
        },
    ),
    "exact_match_reward": BuiltIn(
        "exact_match:exact_match_reward",
        "1.0 if the completion is the gold answer but for surrounding white space, 0.0 if not",
        _GOLD,
        {"after": Option("text", may_be_empty=False), "ignore_case": Option("true or false")},
    ),
    "regex_reward": BuiltIn(
        "regex_match:regex_reward",
        "1.0 if the completion matches a regular expression, 0.0 if not",
        (("pattern",),),
        {"pattern": Option("text"), "mode": Option("text", choices=("search", "match", "fullmatch"))},
        "regex_match:check_pattern",
    ),
    "json_schema_reward": BuiltIn(
        "json_schema:json_schema_reward",
        "1.0 if the completion is JSON that meets a JSON schema, 0.0 if not",
        (("json_schema",),),
        {"json_schema": Option("a table")},
        "json_schema:check_schema",
    ),
    "code_execution_reward": BuiltIn(
        "code_execution:code_execution_reward",
        "share of the row's tests that the completion's Python code passes in a sandbox",
        (("tests",),),
        {
            "partial_credit": Option("true or false"),
            "timeout_s": Option("a number", at_least=0.1, at_most=300),
            "cpu_s": Option("a whole number", at_least=1, at_most=300),
            "memory_mib": Option("a whole number", at_least=64, at_most=65536),
        },
        "code_execution:check_sandbox",
    ),
    "think_format_reward": BuiltIn(
        "think_format:think_format_reward",
        "1.0 if the completion starts with its reasoning between <think> and </think>, 0.0 if not",
    ),
    "soft_overlong_punishment_reward": BuiltIn(
        "overlong:soft_overlong_punishment_reward",
        "from 0 down to -1 within the last fifth of max_completion_length (DAPO, equation 13)",
        options={"soft_punish_cache": Option("a whole number", at_least=1)},
    ),
    "repetition_penalty_reward": BuiltIn(
        "repetition:repetition_penalty_reward",
        "from 0 down to max_penalty with the share of repeated n-grams",
        options={
            "ngram_size": Option("a whole number", at_least=1),
            "max_penalty": Option("a number", at_most=0),
            "unit": Option("text", choices=("tokens", "words")),
        },
    ),
}
ALIASES = {
    "soft_overlong_punishment": "soft_overlong_punishment_reward",
    "get_soft_overlong_punishment": "soft_overlong_punishment_reward",
    "get_repetition_penalty_reward": "repetition_penalty_reward",
}


def _imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    return found


def built_in(name: str) -> BuiltIn | None:
    """Return the built-in reward function of this name or alias, or None."""
    return BUILT_INS.get(ALIASES.get(name, name))


def check_name(name: str) -> None:
    """Raise UserError if ``name`` is neither a built-in nor ``package.module:function``."""
    if built_in(name) is not None:
        return
    if ":" not in name:
        raise unknown_name(name)
    function_loading.check_name(name)


def unknown_name(name: str) -> UserError:
    """Return the error for a name that is neither a built-in nor ``package.module:function``."""
    known = ", ".join(BUILT_INS)
    if ":" not in name and "." in name:
        module, _, attribute = name.rpartition(".")
        return UserError(f"'{name}' is not a built-in reward; did you mean '{module}:{attribute}'?")
    near = nearest(name, [*BUILT_INS, *ALIASES])
    hint = f" Did you mean '{near}'?" if near else ""
    return UserError(
        f"'{name}' is not a built-in reward.{hint} A function of your own is named 'package.module:function'; an "
        f"endpoint is registered with POST /v1/rewards, and tried with POST /v1/rewards/NAME/test. "
        f"The built-ins are: {known}"
    )
