"""Imported by a script before all else: ``train()`` then ends with the services' answer to a dry run of its submit.

    script --settings, functions, data--> submit with dry_run --> ACCEPTED, or the refusal

The data set, the model, the tools, the environment and the reward functions are checked by the services. Nothing is
trained.
"""

import sys
from typing import Any, NoReturn

from headrace.grpo.grpo_trainer import GRPOTrainer
from headrace.grpo.run_of_script import training_settings
from tests.headrace.grpo.trl_suite.agent_scripts import ACCEPTED


def _check(trainer: GRPOTrainer, resume_from_checkpoint: bool | str | None = None) -> NoReturn:
    del resume_from_checkpoint
    training: Any = vars(trainer)["_training"]
    settings, notes = training_settings(training._script(), training._files)
    submission = trainer.client.check(settings)
    for note in (*notes, *submission.warnings):
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"{ACCEPTED} {submission.derived['steps']} steps\n")
    raise SystemExit(0)


GRPOTrainer.train = _check  # type: ignore[method-assign,assignment]
