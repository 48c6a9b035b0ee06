"""Learning-rate schedules: their names, the options of each in ``lr_scheduler_kwargs``, and whether one fits a run.

Names and meanings come from transformers' ``get_scheduler``, which makes the schedule itself (optimizer.py of the
trainer). Mistakes are reported at submit, and the validation of a run must not load torch. So the options are listed
here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shared.run_options.section import steps_of

LrSchedulerType = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
KwargValue = int | float | str

_FOLLOWS_A_METRIC = (
    "adapts the learning rate to a loss that is measured from time to time, but a run's loss does not show how good "
    "the policy is; use a function of the step, such as cosine_with_min_lr"
)
REFUSED_TYPES = {"reduce_lr_on_plateau": _FOLLOWS_A_METRIC, "greedy": _FOLLOWS_A_METRIC}
"""Schedules of transformers that a run does not offer, with the reason."""


@dataclass(frozen=True, kw_only=True)
class _Number:
    lowest: float = 0.0
    highest: float = math.inf
    is_whole: bool = False
    excludes_lowest: bool = False

    def problem(self, value: KwargValue) -> str | None:
        if isinstance(value, str) or (self.is_whole and value != int(value)):
            return f"must be a {'whole ' if self.is_whole else ''}number"
        if value < self.lowest or value > self.highest or (self.excludes_lowest and value == self.lowest):
            above = f"above {self.lowest:g}" if self.excludes_lowest else f"at least {self.lowest:g}"
            return f"must be {above}" + (f" and at most {self.highest:g}" if self.highest < math.inf else "")
        return None


@dataclass(frozen=True)
class _Choice:
    values: tuple[str, ...]

    def problem(self, value: KwargValue) -> str | None:
        return None if value in self.values else f"must be one of {', '.join(self.values)}"


_SHARE = _Number(highest=1.0)
_CYCLES = _Number(highest=1e6, excludes_lowest=True)
_SHAPE = _Choice(("linear", "cosine", "1-sqrt"))
_TO_MINIMUM: dict[str, _Number | _Choice] = {"num_cycles": _CYCLES, "min_lr": _Number(), "min_lr_rate": _SHARE}

_KWARGS: dict[LrSchedulerType, dict[str, _Number | _Choice]] = {
    "linear": {},
    "cosine": {"num_cycles": _CYCLES},
    "cosine_with_restarts": {"num_cycles": _Number(lowest=1, is_whole=True)},
    "polynomial": {"lr_end": _Number(), "power": _Number(excludes_lowest=True)},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": _Number(lowest=1, is_whole=True)},
    "cosine_with_min_lr": _TO_MINIMUM,
    "cosine_warmup_with_min_lr": {**_TO_MINIMUM, "warmup_lr_rate": _SHARE},
    "warmup_stable_decay": {
        "num_decay_steps": _Number(lowest=1, is_whole=True),
        "num_stable_steps": _Number(is_whole=True),
        "warmup_type": _SHAPE,
        "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE,
        "num_cycles": _CYCLES,
    },
}
_SAME_AT_ANY_LENGTH: frozenset[LrSchedulerType] = frozenset({"constant", "constant_with_warmup", "inverse_sqrt"})
_POLYNOMIAL_LR_END = 1e-7
"""transformers' default."""


@dataclass(frozen=True)
class LrSchedule:
    """A run's learning-rate schedule, from its settings."""

    type: LrSchedulerType
    kwargs: Mapping[str, KwargValue]
    learning_rate: float
    warmup_steps: float
    """A number of steps; below 1, a share of the run's steps."""

    def check(self) -> None:
        """Check the options of the schedule, except whether they fit the length of the run.

        Raises:
            ValueError: The schedule is wrong; the message says what to write instead.
        """
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is neither a whole number of steps nor, below 1, a share of the run"
            )
        if self.type == "constant" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} would change nothing: lr_scheduler_type constant has no warm-up; "
                "set lr_scheduler_type: constant_with_warmup"
            )
        known = _KWARGS[self.type]
        for name, value in self.kwargs.items():
            if name not in known:
                takes = f"takes {', '.join(known)}" if known else "takes none"
                raise ValueError(f"lr_scheduler_kwargs has {name}, but lr_scheduler_type {self.type} {takes}")
            if problem := known[name].problem(value):
                raise ValueError(f"lr_scheduler_kwargs has {name}={value!r}, which {problem}")
        self._check_rates()

    def _check_rates(self) -> None:
        """Check that the options say where the learning rate ends, and that this is below ``learning_rate``."""
        if self.type == "warmup_stable_decay" and "num_decay_steps" not in self.kwargs:
            raise ValueError(
                "lr_scheduler_type warmup_stable_decay needs to know how long the last stage is; "
                "set lr_scheduler_kwargs: {num_decay_steps: N}"
            )
        known = _KWARGS[self.type]
        if "min_lr" in known and ("min_lr" in self.kwargs) == ("min_lr_rate" in self.kwargs):
            raise ValueError(
                f"lr_scheduler_type {self.type} needs the learning rate to end at: set either min_lr or min_lr_rate, "
                "its share of learning_rate, in lr_scheduler_kwargs"
            )
        for name, default in (("min_lr", 0.0), ("lr_end", _POLYNOMIAL_LR_END)):
            end = self.kwargs.get(name, default) if name in known else 0.0
            if isinstance(end, str) or end >= self.learning_rate:
                raise ValueError(
                    f"lr_scheduler_type {self.type} ends at {name}={end}, which is not below "
                    f"learning_rate={self.learning_rate}; set {name} in lr_scheduler_kwargs"
                )

    @property
    def depends_on_length(self) -> bool:
        """Whether the learning rate at a step depends on the number of steps of the run."""
        if 0 < self.warmup_steps < 1:
            return True
        # The last stage of warmup_stable_decay begins after num_stable_steps, or so that it ends with the run.
        return self.type not in _SAME_AT_ANY_LENGTH and "num_stable_steps" not in self.kwargs

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of ``total_steps``, as transformers counts them."""
        return steps_of(self.warmup_steps, total_steps)

    def misfit(self, total_steps: int, *, run: str) -> tuple[str, str] | None:
        """Return the wrong option and a sentence if the schedule does not fit a run of ``total_steps``, else None.

        Args:
            total_steps: Optimizer steps of the run.
            run: The run's name in the sentence, with its number of steps.
        """
        if not total_steps:
            return None  # the run only evaluates
        warmup = self.num_warmup_steps(total_steps)
        if warmup > total_steps:
            why = "the learning rate would never reach learning_rate"
            return "warmup_steps", f"warmup_steps={self.warmup_steps} is longer than {run}: {why}"
        if self.type == "polynomial" and warmup == total_steps:
            return "warmup_steps", f"warmup_steps={self.warmup_steps} leaves no step of {run} to decay in"
        if self.type != "warmup_stable_decay":
            return None
        stages = {"warmup_steps": warmup}
        stages |= {
            name: int(self.kwargs[name]) for name in ("num_stable_steps", "num_decay_steps") if name in self.kwargs
        }
        told = " + ".join(f"{name}={steps}" for name, steps in stages.items())
        if sum(stages.values()) > total_steps:
            return "lr_scheduler_kwargs", f"{told} is more than {run}: the learning rate would not decay to its end"
        is_short = "num_stable_steps" in stages and sum(stages.values()) < total_steps
        if is_short and not self.kwargs.get("min_lr_ratio"):
            why = (
                "the steps after them would have a learning rate of 0. Leave num_stable_steps out, or set min_lr_ratio"
            )
            return "lr_scheduler_kwargs", f"{told} is less than {run}: {why}"
        return None
