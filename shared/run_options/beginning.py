"""Run options for starting from a checkpoint or from existing weights."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Section


class BeginningOptions(Section):
    """Options that choose a checkpoint to start from, and the parts of it that the run takes."""

    resume_from_checkpoint: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Begin from a checkpoint: a run (id, beginning of the id, or name) for its newest one, RUN:STEP, "
        "RUN:best, or the directory of a checkpoint, a transformers model or a PEFT adapter",
    )
    resume_only_model: bool = Field(
        default=False, description="Take only the weights; optimizer, schedule and data begin anew"
    )
    ignore_data_skip: bool = Field(
        default=False, description="Take weights, optimizer and schedule, but begin with the first row of the data"
    )

    @field_validator("resume_from_checkpoint")
    @classmethod
    def _a_checkpoint_has_a_printable_name(cls, said: str | None) -> str | None:
        if said is not None and not said.isprintable():
            raise ValueError("must be one line of printable text: a run, RUN:STEP, RUN:best, or a directory")
        return said

    @model_validator(mode="after")
    def _there_is_a_checkpoint_to_take_from(self) -> Self:
        for name in ("resume_only_model", "ignore_data_skip"):
            if getattr(self, name) and self.resume_from_checkpoint is None:
                raise ValueError(f"{name} has no effect without resume_from_checkpoint; set it too, or leave both out")
        return self
