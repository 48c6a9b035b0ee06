"""The ``trainer_state`` argument of reward functions: the progress of training, with transformers' field names.

the run's settings, its progress in Redis --of--> TrainerState, about a second old
"""

from typing import Any, Self

import msgspec

from shared.redis.run_record import Progress
from shared.run_options.run_config import RunConfig


class TrainerState(msgspec.Struct, frozen=True):
    """All fields of transformers' TrainerState. A field without a meaning here keeps its default.

    Steps and epochs count those of the runs that this one continues, too. Otherwise a reward with a schedule would
    start over.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0
    logging_steps: int = 0
    eval_steps: int = 0
    """0 if the run makes no evaluations."""
    save_steps: int = 0
    train_batch_size: int | None = None
    """Completions in an optimizer step."""
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    """Always 0: floating-point operations are not counted."""
    log_history: list[dict[str, float]] = []
    """Empty: metrics are read from the run API."""
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: dict[str, Any] | None = None

    def known(self) -> dict[str, Any]:
        """Return the fields that are sent to a reward endpoint.

        These are ``global_step``, ``max_steps``, and all fields that differ from their default.
        """
        unknown = TrainerState()
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if name in ("global_step", "max_steps") or value != getattr(unknown, name)
        }

    @classmethod
    def of(cls, config: RunConfig, progress: Progress, *, run_dir: str, steps_before: int = 0) -> Self:
        """Return the state of a run.

        Args:
            config: The run's config.
            progress: The run's progress.
            run_dir: The run's directory, for the path of the best checkpoint.
            steps_before: Optimizer steps of the run that this one continues.
        """
        best, in_steps = progress.best, config.in_steps(progress.max_steps)
        step = steps_before + progress.step
        steps = steps_before + progress.max_steps if progress.max_steps else 0  # its training rank does not know it yet
        epochs = progress.epoch * steps / step if step else 0.0
        return cls(
            global_step=step,
            max_steps=steps,
            epoch=progress.epoch,
            num_train_epochs=config.whole_epochs(epochs),
            logging_steps=int(in_steps.logging_steps),
            eval_steps=int(in_steps.eval_steps or 0),
            save_steps=int(in_steps.save_steps),
            train_batch_size=config.groups_per_step * config.num_generations,
            num_input_tokens_seen=progress.num_tokens,
            best_metric=None if best is None else best.value,
            best_global_step=None if best is None else steps_before + best.step,
            best_model_checkpoint=None if best is None else f"{run_dir}/checkpoints/step_{best.step:08d}",
        )
