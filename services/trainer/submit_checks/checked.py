"""The result of one check of a submitted run."""

from dataclasses import dataclass, field
from typing import Any

from services.trainer.problems import Problem
from services.trainer.submit_checks.reward_check import RewardNeeds


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Args:
        errors: Setting and sentence for each error.
        warnings: Sentences about possible surprises.
        problem: Why the check could not be made, if the run is not at fault.
        derived: Quantities that follow from the settings.
        needs: Data set columns that reward functions need.
    """

    errors: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])
    problem: Problem | None = None
    derived: dict[str, Any] = field(default_factory=dict[str, Any])
    needs: list[RewardNeeds] = field(default_factory=list[RewardNeeds])
