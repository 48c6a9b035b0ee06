"""The options of the wire format ``openai_judge``: the judge's model, its rubric, and the form of its answer."""

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from services.rewarder.strict_body import Body, refuse_deep_nesting

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
"""Placeholders have two braces on each side, so that JSON and LaTeX in a rubric are left unchanged."""
NOT_COLUMNS = frozenset({"prompt", "completion"})
_OURS = frozenset({"model", "messages", "stream", "n", "temperature", "max_tokens", "response_format"})
_MAX_SCORE = 1e6


def plain(number: float) -> str:
    """Return a number as text with up to nine significant digits, without trailing zeros."""
    return f"{number:.9g}"


class JudgeOptions(Body):
    """The options of the wire format ``openai_judge``: the judge's model, rubric and scale, and its answer's form."""

    model: str = Field(min_length=1, max_length=300, description="The model's name on the server")
    rubric: str = Field(
        min_length=1,
        max_length=50_000,
        description="The prompt for the judge, with {{prompt}}, {{completion}} and {{any_column}} of the data set",
    )
    min_score: float = Field(
        ge=-_MAX_SCORE, le=_MAX_SCORE, description="The worst score of the rubric; its reward is 0"
    )
    max_score: float = Field(ge=-_MAX_SCORE, le=_MAX_SCORE, description="The best score of the rubric; its reward is 1")
    answer_format: Literal["text", "json"] = Field(
        default="text",
        description="text: the score on a line of its own; json: a JSON object whose schema the server enforces",
    )
    system_prompt: str = Field(default="", max_length=50_000)
    temperature: float | None = Field(default=0.0, ge=0, le=2, description="null is not sent")
    max_tokens: int | None = Field(
        default=1024, ge=1, le=1_000_000, description="Longest answer of the judge, in tokens; null is not sent"
    )
    extra_body: dict[str, Any] = Field(
        default={}, max_length=32, description="Further fields of the request, such as reasoning_effort"
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score={plain(self.min_score)} must be less than max_score={plain(self.max_score)}")
        if "completion" not in PLACEHOLDER.findall(self.rubric):
            raise ValueError("the rubric has no {{completion}}, so the judge would not see the completion")
        if ours := sorted(_OURS & set(self.extra_body)):
            raise ValueError(f"extra_body: {', '.join(ours)} cannot be set there")
        refuse_deep_nesting(self.extra_body)
        return self

    @property
    def columns(self) -> list[str]:
        """The data set columns that the rubric shows, in the order of their first use."""
        return [name for name in dict.fromkeys(PLACEHOLDER.findall(self.rubric)) if name not in NOT_COLUMNS]
