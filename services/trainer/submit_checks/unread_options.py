"""Finds options that a run sets but does not use. They are harmless, but the user probably expects an effect.

Only options that were set explicitly count. Contradictory options are refused by shared/run_options.
"""

from collections.abc import Iterator

from shared.run_options.run_config import RunConfig


def unread_options(config: RunConfig) -> list[str]:
    """Return a sentence for each option that was set without effect; ``config`` is as submitted."""
    return [f"{name} has no effect: {reason}" for name, reason in _unread(config) if name in config.model_fields_set]


def _unread(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not {"wandb", "trackio"} & set(config.report_to):
        yield "project", "only wandb and trackio use it, and report_to has neither"
    if config.logging_steps > 1 and not config.report_to and not config.log_completions:
        yield (
            "logging_steps",
            "only report_to and log_completions use it, and neither is set; the run's own log has every step",
        )
    if config.max_steps > 0:
        yield "num_train_epochs", f"max_steps={config.max_steps} determines the length of the run"
    if config.lr_scheduler_type == "constant_with_warmup" and config.warmup_steps == 0:
        yield "lr_scheduler_type", "constant_with_warmup without warmup_steps is constant; set warmup_steps"
    if config.eval_source() is None:
        yield "max_eval_prompts", "the run has no evaluation data; set eval_dataset_name or dataset_test_split"
