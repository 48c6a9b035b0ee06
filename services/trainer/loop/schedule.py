"""How a run's optimizer steps fall into batches.

    batch                 steps_per_generation minibatches of groups_per_step groups, sampled and chosen together
    its steps             num_iterations passes over the minibatches, in the same order each time
    steps_per_generation=2, num_iterations=2:   [ab][cd]  ->  a b a b   c d c d        one letter, one step

Whole batches fill a run, unless ``max_steps`` ends it within one: that batch is sampled only as far as steps will use
it, and trained as far as there are steps.

    n  steps in a batch
"""

import math
from dataclasses import dataclass
from typing import Self

from shared.errors import UserError
from shared.run_config import RunConfig


@dataclass(frozen=True)
class BatchShape:
    """What one batch consists of."""

    groups_per_step: int
    steps_per_generation: int = 1
    num_iterations: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the shape a run's options ask for."""
        return cls(config.groups_per_step, config.steps_per_generation, config.num_iterations)

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole batch."""
        return self.steps_per_generation * self.num_iterations

    def minibatches(self, *, num_steps_left: int) -> int:
        """Return into how many minibatches the next batch is cut, of a run with so many steps left."""
        return min(self.steps_per_generation, num_steps_left)

    def groups(self, *, num_steps: int) -> int:
        """Return how many prompt groups the coming ``num_steps`` steps are made on."""
        whole, rest = divmod(num_steps, self.steps)
        minibatches = whole * self.steps_per_generation + min(rest, self.steps_per_generation)
        return minibatches * self.groups_per_step


def total_steps(config: RunConfig, *, num_rows: int) -> int:
    """Return ``max_steps``, or the steps in which ``num_train_epochs`` passes over the dataset are trained.

    A batch trains ``groups_per_step * steps_per_generation`` rows, and the last batch may begin another pass to be
    full.

    Raises:
        UserError: There is nothing to train on, or the learning-rate schedule does not fit the run.
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
    return steps
