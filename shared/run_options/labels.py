"""Options that only describe a run to people and programs: its name, tags and metadata. They may change at any time."""

import math
import re
from typing import Any, cast

from pydantic import Field, field_validator
from pydantic.config import JsonDict

from shared.run_options.section import LARGEST, Section

MAX_TAGS = 16
MAX_METADATA = 32
_MAX_VALUE = 256
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_TAG = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._:/=-]{0,63}$")
_INVISIBLE = r"\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
"""Control characters, ends of lines, most characters without a width, and parts of characters."""
_LINE = re.compile(f"^[^{_INVISIBLE}]*$")

MetadataValue = str | int | float
_VALUE: JsonDict = {
    "anyOf": [
        {"type": "string", "maxLength": _MAX_VALUE, "pattern": _LINE.pattern},
        {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST},
        {"type": "number", "not": {"type": "integer"}},
    ]
}


class LabelOptions(Section):
    """The name, tags and metadata of a run. No computation depends on them."""

    name: str | None = Field(
        default=None,
        description="Name for people; the API makes the run id",
        json_schema_extra={"anyOf": [{"type": "string", "pattern": _NAME.pattern}, {"type": "null"}]},
    )
    tags: list[str] = Field(
        default=[],
        max_length=MAX_TAGS,
        description="Words to find the run by: `headrace runs --tag TAG`",
        json_schema_extra={"items": {"type": "string", "pattern": _TAG.pattern}},
    )
    metadata: dict[str, MetadataValue] = Field(
        default={},
        max_length=MAX_METADATA,
        description="Texts and numbers that are shown with the run, by name",
        json_schema_extra={"propertyNames": {"pattern": _NAME.pattern}, "additionalProperties": _VALUE},
    )

    @field_validator("name")
    @classmethod
    def _a_name_is_a_plain_word(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("use letters, digits, '.', '_' and '-', at most 64 of them")
        return name

    @field_validator("tags")
    @classmethod
    def _tags_are_distinct_words(cls, tags: list[str]) -> list[str]:
        for number, tag in enumerate(tags):
            if not _TAG.fullmatch(tag):
                raise ValueError(f"tag {number} must be letters, digits and '.', '_', ':', '/', '=', '-', at most 64")
        return list(dict.fromkeys(tags))

    @field_validator("metadata", mode="before")
    @classmethod
    def _metadata_is_texts_and_numbers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: _shown(name, given) for name, given in cast("dict[object, object]", value).items()}


def _shown(name: object, value: object) -> MetadataValue:
    """Return a metadata value if it and its name are allowed.

    Raises:
        ValueError: The value or its name is of another type, too long, or too large to be exact everywhere.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("its names are letters, digits, '.', '_' and '-', at most 64 of them")
    if isinstance(value, str):
        if len(value) > _MAX_VALUE or not _LINE.fullmatch(value):
            raise ValueError(f"{name} must be one line of at most {_MAX_VALUE} characters")
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST}; write a larger whole number as text")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite")
        return value
    raise ValueError(f"{name} must be text or a number")
