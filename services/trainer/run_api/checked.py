"""What one check of a submitted run has found."""

from dataclasses import dataclass, field
from typing import Any

from services.trainer.run_api.problems import Problem
from services.trainer.run_api.reward_check import RewardNeeds


@dataclass(frozen=True)
class Checked:
    """What a check has found.

    Args:
        errors: Setting and sentence of each thing that is wrong.
        warnings: Sentences about what may surprise.
        problem: Why nothing could be checked, if that is nobody's fault.
        derived: What the settings amount to.
        needs: What reward functions ask of the data set.
    """

    errors: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])
    problem: Problem | None = None
    derived: dict[str, Any] = field(default_factory=dict[str, Any])
    needs: list[RewardNeeds] = field(default_factory=list[RewardNeeds])
