"""The base class of all sections of a run's options."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

LARGEST = 2**53
"""The largest whole number in a run: every reader of JSON represents it exactly."""


class Section(BaseModel):
    """Options that belong together. Unknown keys are refused, types are not coerced, and NaN is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _a_whole_number_can_be_counted_to(cls, value: object) -> object:
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"must be at most {LARGEST}")
        return value
