"""Run options for checkpoints, the Hugging Face Hub, logs and trackers."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Section, Share, whole_or_share

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet_ml"]

_HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_MAX_REPO_ID = 96
EVALUATION = "eval_"
"""Prefix of the metrics of an evaluation."""
DEFAULT_BEST_METRIC = "eval_reward"
ABOUT_BEST = ("metric_for_best_model", "load_best_model_at_end", "early_stopping_patience")
"""Settings each of which makes a run look for its best checkpoint."""


class KeepingOptions(Section):
    """Options of checkpoints, the best checkpoint, the Hugging Face Hub, logs and trackers."""

    save_steps: int | float = Field(
        default=10,
        gt=0,
        description="Optimizer steps between checkpoints, which are written while training goes on; below 1, a share "
        "of the run's steps",
    )
    save_total_limit: int = Field(
        default=2,
        ge=1,
        description="Checkpoints kept, besides the best; an older checkpoint is used if the newest is damaged",
    )
    push_to_hub: bool = Field(default=False, description="Upload the final model to the Hugging Face Hub")
    hub_model_id: str | None = Field(
        default=None, description="owner/name on the hub; the run's name or id if left out"
    )
    hub_private_repo: bool = Field(default=False, description="Whether a new repository on the hub is private")

    # The best checkpoint and early stopping
    metric_for_best_model: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Metric of evaluations by which checkpoints are compared, with or without eval_; if left out, "
        "eval_reward with load_best_model_at_end or early_stopping_patience, otherwise none",
    )
    greater_is_better: bool | None = Field(
        default=None, description="Whether larger values of the metric are better; if left out, unless it ends in loss"
    )
    load_best_model_at_end: bool = Field(
        default=False, description="The final model has the weights of the best checkpoint, and not of the last step"
    )
    early_stopping_patience: int | None = Field(
        default=None, ge=1, description="The run ends after this many evaluations in a row without an improvement"
    )
    early_stopping_threshold: float = Field(
        default=0.0, ge=0, description="Only a larger difference from the best value counts as an improvement"
    )

    # Logs
    log_rollouts_every_steps: int = Field(default=1, ge=1, description="Steps between entries of the rollout log")
    log_per_token_share: Share = Field(
        default=0.0,
        description="Share of the logged rollouts that carry logprobs, importance ratio and entropy of every token",
    )
    logging_steps: int | float = Field(
        default=1,
        gt=0,
        description="Number of optimizer steps that a report or table sums up; below 1, a share of the run's steps; "
        "the run's own log has every step",
    )
    log_completions: bool = Field(
        default=False, description="Print a table of completions into rank.log, and send it to the trackers"
    )
    num_completions_to_print: int | None = Field(
        default=None, ge=1, description="Number of rows to print, drawn at random; all if left out"
    )
    log_unique_prompts: bool = Field(default=False, description="One row per prompt in that table")
    report_to: list[Tracker] = Field(
        default=[], max_length=16, description="Where metrics go besides the run's own log"
    )
    project: str = Field(
        default="headrace",
        min_length=1,
        max_length=128,
        description="Project of the run in the trackers; the experiment in MLflow",
    )

    _steps_are_whole = field_validator("save_steps", "logging_steps")(whole_or_share)

    @field_validator("report_to", mode="before")
    @classmethod
    def _trl_also_takes_one_name(cls, value: Any) -> Any:
        if value == "none":
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("report_to")
    @classmethod
    def _trackers_are_distinct(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError(f"{', '.join(names)} names a tracker twice")
        return names

    @field_validator("project")
    @classmethod
    def _a_project_is_a_name_everywhere(cls, name: str) -> str:
        if unwanted := sorted(set(name) & set("/\\#?%:")):
            raise ValueError(f"wandb does not allow {' '.join(unwanted)} in a project's name")
        return name

    @model_validator(mode="after")
    def _a_table_is_printed_to_be_short(self) -> Self:
        for name in ("num_completions_to_print", "log_unique_prompts"):
            if getattr(self, name) and not self.log_completions:
                raise ValueError(f"{name} has no effect without the table; set log_completions: true to print it")
        return self

    @field_validator("metric_for_best_model")
    @classmethod
    def _evaluations_have_no_loss(cls, name: str | None) -> str | None:
        if name in ("loss", f"{EVALUATION}loss"):
            raise ValueError(
                f"evaluations sample and score completions, and compute no loss; leave it out for {DEFAULT_BEST_METRIC}"
            )
        return name

    @property
    def finds_best(self) -> bool:
        """Whether evaluations decide which checkpoint is the best."""
        return any(getattr(self, name) for name in ABOUT_BEST)

    @property
    def best_metric_name(self) -> str:
        """Name of the evaluation metric that decides which checkpoint is the best, with the prefix ``eval_``."""
        name = self.metric_for_best_model or DEFAULT_BEST_METRIC
        return name if name.startswith(EVALUATION) else f"{EVALUATION}{name}"

    @property
    def is_greater_better(self) -> bool:
        """Whether larger values of the metric ``best_metric_name`` are better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not self.best_metric_name.endswith("loss")

    @model_validator(mode="after")
    def _the_best_is_found_by_evaluations(self) -> Self:
        if not self.finds_best:
            if self.greater_is_better is not None:
                raise ValueError("greater_is_better has no effect without a metric; set metric_for_best_model")
        elif getattr(self, "eval_steps", None) is None:
            first = next(name for name in ABOUT_BEST if getattr(self, name))
            raise ValueError(f"{first} compares evaluations, and the run makes none while it trains; set eval_steps")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold has no effect alone; set early_stopping_patience as well")
        return self

    @model_validator(mode="after")
    def _the_hub_options_go_together(self) -> Self:
        for option in ("hub_model_id", "hub_private_repo"):
            if getattr(self, option) and not self.push_to_hub:
                raise ValueError(f"{option} is set, but push_to_hub is not; set push_to_hub: true to upload")
        name: str | None = getattr(self, "name", None)
        if self.push_to_hub and self.hub_model_id is None and name is not None and not _is_hub_name(name):
            raise ValueError(f"the hub has no repositories named {name!r}; set hub_model_id: owner/name")
        return self

    @field_validator("hub_model_id")
    @classmethod
    def _the_hub_would_take_the_id(cls, repo_id: str | None) -> str | None:
        if repo_id is None:
            return None
        *owner, name = repo_id.split("/")
        if len(owner) > 1 or len(repo_id) > _MAX_REPO_ID or not all(_is_hub_name(part) for part in (*owner, name)):
            raise ValueError(
                f"{repo_id!r} is not a repository id; write owner/name (or only name, for your account) with letters, "
                f"digits, '-', '_' and '.', not at the ends and no two in a row, at most {_MAX_REPO_ID} characters"
            )
        return repo_id


def _is_hub_name(name: str) -> bool:
    """Whether the hub takes the name for a repository or its owner: huggingface_hub's validate_repo_id."""
    return _HUB_NAME.fullmatch(name) is not None and "--" not in name and ".." not in name and not name.endswith(".git")
