"""Arguments and attributes of TRL's trainer: computes the supported ones, and says why others are missing.

The training runs in services, so a script has no optimizer, no batches and no loss of its own.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.definitions import plain_name
from headrace.terminal import say
from shared.run_options.from_trl import INSTEAD
from shared.run_options.grpo_config import GRPOConfig

_NOT_TOOLS: Final = ("reset", "get_reward")
_BATCHES: Final = "prompts are read by the training ranks; trainer.train_dataset and trainer.eval_dataset are the rows"
_STEPS: Final = "the training ranks make the steps; a trainer.add_callback() sees each, with its metrics"
_OPTIMIZER: Final = "the training ranks have it; options of GRPOConfig set it, and metrics have its learning rate"
_SAMPLING: Final = "completions are sampled by the generators; trainer.client.rollouts(trainer.run['run_id']) has them"
ELSEWHERE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "data_collator"), _BATCHES),
    **dict.fromkeys(("training_step", "compute_loss", "prediction_step", "evaluation_loop"), _STEPS),
    **dict.fromkeys(("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"), _STEPS),
    **dict.fromkeys(("optimizer", "lr_scheduler", "create_optimizer", "create_scheduler"), _OPTIMIZER),
    **dict.fromkeys(("create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"), _OPTIMIZER),
    **dict.fromkeys(("vllm_generation", "llm", "generation_config"), _SAMPLING),
    "environments": "environments are processes of the sessions service; reward functions get their attributes",
    "ref_model": "the training ranks have the reference model, if beta is not 0; it is the model before the training",
    "rollout_func": "write it as an agent program, which plays one rollout: run_options={'agent': 'my_agent:run'}",
    "predict": "trainer.evaluate() has metrics, and trainer.model.generate() has completions",
    "hyperparameter_search": "make a trainer for each set of options",
    "callback_handler": "add_callback(), remove_callback() and pop_callback() of the trainer do the same",
    "model_wrapped": "the training ranks wrap it; trainer.model has the weights of the last training",
}
"""Attribute to the reason why a script's trainer does not have it, and what to use instead."""

_RENAMED: Final = {"tokenizer": "processing_class"}
"""Attributes under their names in older versions."""

_HOOKS: Final = frozenset(
    {
        *("_compute_loss", "_calculate_rewards", "_generate", "_generate_and_score_completions", "_prepare_inputs"),
        *("_generate_single_turn", "_tokenize_prompts", "_get_per_token_logps_and_entropies", "_inner_training_loop"),
        *("_get_train_sampler", "_get_eval_sampler", "_save_checkpoint", "_maybe_log_save_evaluate", "_save"),
        *("_tool_call_loop", "_get_tool_suffix_ids", "_log_metric", "_log_completion_extra"),
        *("_set_signature_columns_if_needed", "_load_optimizer_and_scheduler"),
    }
)
"""Private methods of TRL's training that subclasses override."""


_CALLBACKS: Final = {"log": "on_log", "evaluate": "on_evaluate", "save_model": "on_save"}
"""Methods that TRL's training calls and a script may call too, to the events of callbacks at the same moments."""


def refuse_unsupported(*, args: Any, optimizers: Sequence[Any], rollout_func: Any) -> None:
    """Refuse unsupported arguments of the constructor, and a script that was launched in several processes.

    Raises:
        ArgumentError: An argument is not supported, or WORLD_SIZE is above 1. The message says what to do instead.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ArgumentError(
            "this script runs in several processes, and each would begin a run: start it with python, and set the "
            "number of training processes with run_options={'nproc_per_node': N}"
        )
    if args is not None and not isinstance(args, GRPOConfig):
        kind = cast("type[object]", type(args))
        raise ArgumentError(
            f"args is a {kind.__name__} of {kind.__module__}; give headrace's GRPOConfig, which has the options of "
            "TRL's: from headrace import GRPOConfig"
        )
    if tuple(optimizers) != (None, None):
        raise ArgumentError(f"optimizers is not supported: {INSTEAD['optimizers']}")
    if rollout_func is not None:
        raise ArgumentError(f"rollout_func is not supported: {INSTEAD['rollout_func']}")


def check_overrides(kind: type, *, trainer: type) -> None:
    """Refuse a subclass that overrides a method that nothing would call.

    For ``log``, ``evaluate`` and ``save_model``, which only the script itself can call here, a note is printed.

    Args:
        kind: The new subclass. Its mixins are checked too, but not its parents that are subclasses of ``trainer``.
        trainer: The class ``GRPOTrainer``, which imports this module.

    Raises:
        ArgumentError: The subclass has a method that nothing would call.
    """
    over = kind.__mro__[: kind.__mro__.index(trainer)]
    for name in [name for it in over if it is kind or not issubclass(it, trainer) for name in vars(it)]:
        if name in ELSEWHERE or name in _HOOKS:
            raise ArgumentError(f"{kind.__name__}.{name} would never be called: {ELSEWHERE.get(name, _STEPS)}")
        if name in _CALLBACKS:
            say(f"note: train() does not call {kind.__name__}.{name}; it calls {_CALLBACKS[name]} of callbacks")


def as_list(value: Any) -> list[Any]:
    """Return an argument that is one object, a list or a tuple as a list; empty for None."""
    if value is None:
        return []
    return [*cast("Sequence[Any]", value)] if isinstance(value, (list, tuple)) else [value]


def missing(name: str) -> AttributeError:
    """Return an AttributeError that says why a trainer does not have an attribute, and what to use instead."""
    is_option = name in (option.name for option in fields(GRPOConfig))
    why = f"it is an option; trainer.args.{name} has its value" if is_option else ELSEWHERE.get(name)
    if name in _RENAMED:
        why = f"it is trainer.{_RENAMED[name]}"
    return AttributeError(f"GRPOTrainer has no {name}" + (f" here: {why}" if why else ""))


class ScriptProcess:
    """Stands for ``trainer.accelerator`` in a script, which is one process."""

    is_main_process = is_local_main_process = is_last_process = True
    process_index = local_process_index = 0
    num_processes = 1

    def print(self, *values: Any, **options: Any) -> None:
        """Print the values, with the options of Python's ``print``."""
        print(*values, **options)  # noqa: T201

    def wait_for_everyone(self) -> None:
        """Return at once: there is no other process."""

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says why an attribute of ``trainer.accelerator`` is missing."""
        raise AttributeError(
            f"trainer.accelerator has no {name} here: a script is one process, and the training runs in the services"
        )


def environment_classes(environment_factory: Any) -> list[type]:
    """Return the classes among environment factories, each once. Functions are left out: their class is not known."""
    factories: Sequence[Any] = [environment_factory]
    if isinstance(environment_factory, Mapping):
        factories = [*cast("Mapping[str, Any]", environment_factory).values()]
    return list(dict.fromkeys(factory for factory in factories if isinstance(factory, type)))


def reward_func_names(reward_funcs: Sequence[Any], environment_factory: Any) -> list[str]:
    """Return the rewards' names in metrics: functions and models first, then environments with ``get_reward``."""
    names = [_name(function, number) for number, function in enumerate(reward_funcs)]
    return [*names, *(kind.__name__ for kind in _rewarding(environment_factory))]


def reward_weights(given: Sequence[float] | None, *, num_functions: int, environment_factory: Any) -> npt.NDArray[Any]:
    """Return the weights of reward functions, followed by a weight of 1 for each environment with ``get_reward``.

    Raises:
        ArgumentError: The number of weights differs from the number of functions.
    """
    functions = [1.0] * num_functions if given is None else [*given]
    if len(functions) != num_functions:
        raise ArgumentError(
            f"Number of reward weights ({len(functions)}) must match number of reward functions ({num_functions})"
        )
    return np.array([*functions, *(1.0 for _ in _rewarding(environment_factory))], dtype=np.float32)


def reward_tokenizers(given: Sequence[Any], *, num_functions: int) -> list[Any]:
    """Return a tokenizer for each reward function. None means the model's own; if none is given, all are None.

    Raises:
        ArgumentError: The number of tokenizers differs from the number of functions.
    """
    if all(tokenizer is None for tokenizer in given):
        return [None] * num_functions
    if len(given) != num_functions:
        raise ArgumentError(
            f"The number of reward processing classes ({len(given)}) must match the number of reward functions "
            f"({num_functions}); None stands for a model's own tokenizer"
        )
    return [*given]


def all_tools(tools: Sequence[Any], environment_factory: Any) -> list[Any]:
    """Return the tools, and the public methods of environment classes other than ``reset`` and ``get_reward``."""
    methods = [
        method
        for kind in environment_classes(environment_factory)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name not in _NOT_TOOLS and not name.startswith("_")
    ]
    return [*tools, *dict.fromkeys(methods)]


def _rewarding(environment_factory: Any) -> list[type]:
    return [kind for kind in environment_classes(environment_factory) if hasattr(kind, "get_reward")]


def _name(function: Any, number: int) -> str:
    if isinstance(function, str):
        return function.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    if hasattr(function, "save_pretrained"):
        return str(function.config._name_or_path).rstrip("/").rpartition("/")[2]  # noqa: SLF001  as in transformers
    return plain_name(function, otherwise=f"reward_{number}")
