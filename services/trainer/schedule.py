"""How many optimizer steps a run has."""

import math

from shared.errors import UserError
from shared.run_config import RunConfig


def total_steps(config: RunConfig, *, num_rows: int) -> int:
    """Return ``max_steps``, or the steps in which ``num_train_epochs`` passes over the dataset are trained.

    One step trains ``groups_per_step`` rows, and the last step may begin another pass to be full.

    Raises:
        UserError: There is nothing to train on, or the warm-up is longer than the run.
    """
    if num_rows < 1:
        raise UserError("the dataset has no rows", field="dataset_name")
    steps = config.max_steps
    if steps < 0:
        steps = max(1, math.ceil(config.num_train_epochs * num_rows / config.groups_per_step))
    if config.warmup_steps > steps:
        raise UserError(
            f"warmup_steps={config.warmup_steps} is longer than the run: {config.num_train_epochs:g} epochs of "
            f"{num_rows} rows are {steps} steps of groups_per_step={config.groups_per_step}; lower warmup_steps "
            "or train longer",
            field="warmup_steps",
        )
    return steps
