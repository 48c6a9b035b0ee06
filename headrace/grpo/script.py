"""The arguments of a script's trainer, and the files that their objects become."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_inputs import RunInputs
from shared.run_options.grpo_config import GRPOConfig


@dataclass(frozen=True)
class Script:
    """The arguments of a trainer, as in TRL's constructor."""

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
        """How the weights are quantized: by the trainer's argument, or in the model object."""
        return self.quantization_config or self.model.quantization_config


@dataclass
class Files:
    """Writes inputs when they are needed. Trainings and evaluations share the files.

    Functions, lists of rows, and files and directories by name are taken each time, because they may have changed;
    the same content has the same file. All other inputs are written once.
    """

    inputs: Callable[[], RunInputs]
    written: dict[tuple[str, int], tuple[Any, str]] = field(default_factory=dict[tuple[str, int], tuple[Any, str]])
    """The values are kept, so that no later object gets the id of an earlier one."""

    def once(self, kind: str, value: Any, write: Callable[[RunInputs], str]) -> str:
        """Return the path or name of ``value``, and write it the first time."""
        key = (kind, id(value))
        if key not in self.written:
            self.written[key] = value, write(self.inputs())
        return self.written[key][1]

    def function(self, function: Any, *, otherwise: str) -> str:
        """Return the name of a function, and write its source; ``otherwise`` names one without a name."""
        return function if isinstance(function, str) else self.inputs().function(function, otherwise=otherwise)
