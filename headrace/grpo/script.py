"""The arguments of a script's GRPOTrainer, and the files that their objects become for the services."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_inputs import RunInputs
from shared.run_options.grpo_config import GRPOConfig


@dataclass(frozen=True)
class Script:
    """The arguments of a script's GRPOTrainer, named as in TRL's constructor."""

    model: LiveModel
    reward_funcs: Sequence[Any]
    args: GRPOConfig
    train_dataset: Any = None
    eval_dataset: Any = None
    reward_processing_classes: Sequence[Any] = ()
    quantization_config: Any = None
    tools: Sequence[Any] = ()
    environment_factory: Any = None

    @property
    def bits(self) -> Any:
        """The quantization config: the trainer's argument or, without one, the model object's."""
        return self.quantization_config or self.model.quantization_config


@dataclass
class Files:
    """Writes a script's data, models and functions to files when a run needs them. A trainer's runs share the files.

    Functions, lists of rows, and files and directories by name are read again for each run, because they may have
    changed. The same content gets the same file. All other inputs are written once.
    """

    inputs: Callable[[], RunInputs]
    written: dict[tuple[str, int], tuple[Any, str]] = field(default_factory=dict[tuple[str, int], tuple[Any, str]])
    """The values are kept, so that no later object gets the id of an earlier one."""

    def once(self, kind: str, value: Any, write: Callable[[RunInputs], str]) -> str:
        """Return the path or name by which the services find ``value``. The first call for an object writes it.

        Args:
            kind: Tells apart different files that are made from one object.
            value: The object, which is recognised by its identity.
            write: Writes the object, and returns its path or name.
        """
        key = (kind, id(value))
        if key not in self.written:
            self.written[key] = value, write(self.inputs())
        return self.written[key][1]

    def function(self, function: Any, *, otherwise: str) -> str:
        """Write a function's source for the services, and return its name as ``module:function``.

        Args:
            function: The function. A text is returned unchanged, because it is already a name.
            otherwise: The name of a function without one, such as a lambda.
        """
        return function if isinstance(function, str) else self.inputs().function(function, otherwise=otherwise)
