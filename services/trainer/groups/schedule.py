"""Divides a run's optimizer steps into batches of prompt groups.

    batch                 steps_per_generation minibatches of groups_per_step groups, sampled and chosen together
    its steps             num_iterations passes over the minibatches, in the same order each time
    steps_per_generation=2, num_iterations=2:   [ab][cd]  ->  a b a b   c d c d        a letter is a minibatch

A run consists of whole batches, unless ``max_steps`` ends it within one. That last batch only has the groups that its
remaining steps use, and is trained for those steps.
"""

import math
from dataclasses import dataclass
from typing import Self

from shared.errors import UserError
from shared.run_options.run_config import RunConfig


@dataclass(frozen=True)
class BatchShape:
    """The size of a whole batch: groups per step, minibatches per batch, and passes over them."""

    groups_per_step: int
    steps_per_generation: int = 1
    num_iterations: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the batch size that a run's config sets."""
        return cls(config.groups_per_step, config.steps_per_generation, config.num_iterations)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of a whole batch."""
        return self.steps_per_generation * self.num_iterations

    def minibatches(self, *, num_steps_left: int) -> int:
        """Return the number of minibatches in the next batch if ``num_steps_left`` optimizer steps remain."""
        return min(self.steps_per_generation, num_steps_left)

    def groups(self, *, num_steps: int) -> int:
        """Return the number of prompt groups that ``num_steps`` steps use, counted from the beginning of a batch."""
        whole, rest = divmod(num_steps, self.steps)
        minibatches = whole * self.steps_per_generation + min(rest, self.steps_per_generation)
        return minibatches * self.groups_per_step


@dataclass
class RunLength:
    """The number of optimizer steps of a run. A user may change it while the run trains."""

    total_steps: int
    steps_before: int = 0
    """Optimizer steps that ``max_steps`` counts, but that another run has made. ``total_steps`` is without them."""

    def num_left(self, policy_version: int) -> int:
        """Return the number of optimizer steps that remain at a policy version."""
        return max(0, self.total_steps - policy_version)


def total_steps(config: RunConfig, *, num_rows: int, steps_before: int = 0) -> int:
    """Return ``max_steps`` if set, else the steps of ``num_train_epochs`` passes over the dataset.

    If the run continues another one, the ``steps_before`` that the other one made are subtracted, as in transformers.

    A batch trains ``groups_per_step * steps_per_generation`` rows. To be full, the last batch may begin another pass.

    Raises:
        UserError: The dataset is empty, the learning-rate schedule does not fit the run, or no step is left.
    """
    if num_rows < 1:
        raise UserError("the dataset has no rows", field="dataset_name")
    shape = BatchShape.of(config)
    steps = config.max_steps
    if steps < 0:
        groups_per_batch = shape.groups(num_steps=shape.steps)
        steps = max(1, math.ceil(config.num_train_epochs * num_rows / groups_per_batch)) * shape.steps
    run = (
        f"the run ({config.num_train_epochs:g} epochs of {num_rows} rows are {steps} steps of "
        f"groups_per_step={config.groups_per_step})"
    )
    if misfit := config.lr_schedule().misfit(steps, run=run):
        field, sentence = misfit
        raise UserError(sentence, field=field)
    if 0 < steps <= steps_before:
        field = "max_steps" if config.max_steps > 0 else "num_train_epochs"
        raise UserError(
            f"the checkpoint that the run continues has made {steps_before} optimizer steps, and {field} ends the run "
            f"at {steps}: nothing is left to train. Raise {field}, or set resume_only_model: true to begin at step 0",
            field=field,
        )
    return max(0, steps - steps_before)
