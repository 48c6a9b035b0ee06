"""The base class of a run's option classes, and types and functions that several of them use."""

import math
from types import NoneType
from typing import Annotated, Any, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import DEFAULT_REF_TEMPLATE

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

LARGEST = 2**53
"""The largest whole number in a run: every reader of JSON represents it exactly."""


def steps_of(steps: float, total_steps: int) -> int:
    """Return a number of steps as an int. Below 1 it is a share of ``total_steps``, rounded up as in transformers."""
    return int(steps) if steps >= 1 else math.ceil(total_steps * steps)


def whole_or_share(steps: float | None) -> float | None:
    """Return ``steps`` if it is a whole number of steps or, below 1, a share of the run. Otherwise raise ValueError."""
    if steps is not None and steps >= 1 and steps != int(steps):
        raise ValueError(f"{steps} is neither a whole number of steps nor, below 1, a share of the run")
    return steps


class Section(BaseModel):
    """The base class of a run's option classes. Refuses unknown keys, NaN and infinity, and does not coerce types.

    Null means that an option is not set, as in TRL, unless null is a value of the option and not its default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return cast("object", given)
        settings = cast("dict[str, object]", given)
        return {name: value for name, value in settings.items() if value is not None or cls._takes_null(name)}

    @classmethod
    def _takes_null(cls, name: str) -> bool:
        """Return whether null must reach the field's validation, as a value of its own or as an error to report."""
        field = cls.model_fields.get(name)
        if field is None or field.is_required():
            return True
        return field.default is not None and NoneType in get_args(field.annotation)

    @field_validator("*")
    @classmethod
    def _a_whole_number_can_be_counted_to(cls, value: object) -> object:
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"must be at most {LARGEST}")
        return value

    @classmethod
    def document(cls, *, ref_template: str = DEFAULT_REF_TEMPLATE) -> dict[str, Any]:
        """Return the JSON schema of the options, which also allows null for every option that may be left out."""
        schema = cls.model_json_schema(ref_template=ref_template)
        for name, field in cls.model_fields.items():
            if not field.is_required():
                schema["properties"][name] = _or_null(schema["properties"][name])
        return schema


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that allows null as well as the values of ``schema``."""
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    about = {key: schema[key] for key in ("default", "description", "title") if key in schema}
    return about | {"anyOf": [{key: value for key, value in schema.items() if key not in about}, {"type": "null"}]}
