"""Translates a script's reward functions to settings of a run: each becomes a name, a path, or a written module."""

import inspect
import os
from pathlib import Path
from types import FunctionType
from typing import Any

from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.live_model import is_own_tokenizer, own_tokenizer
from headrace.grpo.script import Files, Script
from headrace.grpo.trainer_attributes import reward_func_names
from shared.run_options.grpo_config import GRPOConfig


def reward_settings(script: Script, files: Files) -> dict[str, Any]:
    """Return the settings ``reward_funcs``, with a name for each function, and ``reward_kwargs`` for built-in ones.

    Raises:
        ArgumentError: A function or its tokenizer cannot be used.
    """
    names: list[str] = []
    kwargs: dict[str, dict[str, Any]] = {}
    for number, (function, tokenizer) in enumerate(
        zip(script.reward_funcs, script.reward_processing_classes, strict=True)
    ):
        built_in = _built_in(function)
        given = {} if built_in is None else _arguments_of_built_in(function, script.args)
        if built_in is not None and kwargs.setdefault(built_in, given) == given:
            names.append(built_in)
        else:  # a second one with other arguments is a function like any other
            names.append(_reward(function, tokenizer, files, number))
    found: dict[str, Any] = {"reward_funcs": names}
    if kwargs := {name: given for name, given in kwargs.items() if given}:
        found["reward_kwargs"] = kwargs
    return found


def _reward(function: Any, tokenizer: Any, files: Files, number: int) -> str:
    if isinstance(function, str):
        if tokenizer is not None and not is_own_tokenizer(tokenizer, function):
            raise ArgumentError(
                f"reward_processing_classes: {function} is scored with its own tokenizer; to use another one, load the "
                "model, and give the object in reward_funcs"
            )
        if "/" in function and os.path.isdir(Path(function).expanduser()):
            return files.inputs().path(function)
        return function
    if hasattr(function, "save_pretrained"):
        tokenizer = own_tokenizer(function) if tokenizer is None else tokenizer
        (name,) = reward_func_names([function], None)
        return files.once("model", function, lambda inputs: inputs.model(function, tokenizer, name=name))
    return files.function(function, otherwise=f"reward_{number}")


def _built_in(function: Any) -> str | None:
    """Return the name of a ``trl.rewards`` function that is built into the rewarder; None for any other function."""
    from services.rewarder.built_ins.built_in_rewards import BUILT_INS

    name = str(getattr(function, "__name__", ""))
    # Not the function's own __module__: functools.wraps gives it to functions around it.
    home = (
        str(function.__globals__.get("__name__")) if isinstance(function, FunctionType) else type(function).__module__
    )
    return name if home.startswith("trl.rewards") and name in BUILT_INS else None


def _arguments_of_built_in(function: Any, args: GRPOConfig) -> dict[str, Any]:
    """Return the arguments that a ``trl.rewards`` function was made with, from its attributes or closure variables.

    Raises:
        ArgumentError: It was made for another ``max_completion_length`` than the run's.
    """
    is_plain = isinstance(function, FunctionType)
    given: dict[str, Any] = {**(inspect.getclosurevars(function).nonlocals if is_plain else vars(function))}
    most = args.run_options.get("max_completion_length", args.max_completion_length)
    if (counts_from := given.pop("max_completion_len", most)) != most:
        raise ArgumentError(
            f"{function.__name__} counts from {counts_from} tokens, but is scored here with max_completion_length, "
            f"which is {most}: give it the same number"
        )
    return given
