"""Options that only describe a run to people and programs: its name, tags and metadata. They may change at any time."""

import math
import re
from typing import Any, cast

from pydantic import Field, field_validator

from shared.run_options.section import LARGEST, Section

MAX_TAGS = 16
MAX_METADATA = 32
_MAX_VALUE = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=-]{0,63}")

MetadataValue = str | int | float


class LabelOptions(Section):
    """Labels of a run. No computation depends on them."""

    name: str | None = Field(default=None, description="Name for people; the API makes the run id")
    tags: list[str] = Field(
        default=[], max_length=MAX_TAGS, description="Words to find the run by: `headrace runs --tag TAG`"
    )
    metadata: dict[str, MetadataValue] = Field(
        default={}, max_length=MAX_METADATA, description="Texts and numbers that are shown with the run, by name"
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
        for name, given in cast("dict[object, object]", value).items() if isinstance(value, dict) else ():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError("its names are letters, digits, '.', '_' and '-', at most 64 of them")
            if why := _why_not_shown(given):
                raise ValueError(f"{name} must be {why}")
        return cast("object", value)


def _why_not_shown(value: object) -> str | None:
    """Return what a value of the metadata should be instead; None if it is good."""
    if isinstance(value, str):
        return (
            None if value.isprintable() and len(value) <= _MAX_VALUE else f"one line of at most {_MAX_VALUE} characters"
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "text or a number"
    is_countable = abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)
    return None if is_countable else f"finite, and at most {LARGEST} if it is whole"
