r"""The wire format ``openai_judge``: a language model scores completions, behind any OpenAI-compatible chat API.

    rubric with {{prompt}}, {{completion}}, {{column}}  -->  POST URL/chat/completions, one completion per request
    "... reads well, but the sum is wrong.\nScore: 4"    -->  (4 - min_score) / (max_score - min_score)

An answer without a clear score, or with a score outside the scale, is ``invalid``. No score is clamped, guessed or
taken from the middle of a sentence. Placeholders are filled in once, so a placeholder in a completion stays plain text.
"""

import re
from typing import Any, cast

import msgspec

from services.rewarder.endpoints.judge_options import PLACEHOLDER, JudgeOptions, plain
from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.wire_format import (
    MAX_COMPONENTS,
    InvalidAnswerError,
    NothingToJudgeError,
    RequestContext,
    WireRequest,
    as_object,
    component_name,
    finite,
    parse_json,
)
from services.rewarder.reward_call import CallError, RewardCall, Verdict
from shared.chat_text import chat_text
from shared.messages import Completion
from shared.user_code.error_text import MAX_DETAIL_CHARS, printable

PATH = "/chat/completions"
_SCORE_LINE = re.compile(r"^[^\w\n]{0,8}score[*_]{0,3}\s{0,3}[:=]([^\n]*)$", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(
    r"[\s*_\[(`$]{0,8}([+-]?\d{1,9}(?:\.\d{1,9})?)\s{0,3}(?:(?:/|out of)\s{0,3}(\d{1,9}(?:\.\d{1,9})?))?"
)
_AFTER = re.compile(r"[\s*_\])`$.]*")
_FENCED = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*?)```\s*\Z", re.DOTALL)
_CUT_CHARACTERS = 200


class OpenAIJudgeFormat:
    """Writes a chat request that asks a language model for a score, and reads the score from its answer."""

    max_batch: int | None = 1

    def required_columns(self, spec: EndpointSpec) -> list[list[str]]:
        """Return the data set columns that the judge's rubric shows."""
        return [[column] for column in _options(spec).columns]

    def check(self, call: RewardCall, *, spec: EndpointSpec) -> None:
        """Accept a call that has a value in each column that the rubric shows.

        Raises:
            CallError: The call lacks such a column.
            NothingToJudgeError: Such a column is null in this dataset row.
        """
        for column in _options(spec).columns:
            if column not in call.columns:
                columns = ", ".join(sorted(call.columns)) or "none"
                raise CallError(f"its rubric shows the column '{column}'; the columns are: {columns}")
            if call.columns[column][0] is None:
                raise NothingToJudgeError(f"its rubric shows the column '{column}', which is null in this row")

    def encode(self, call: RewardCall, *, spec: EndpointSpec, context: RequestContext) -> WireRequest:
        """Return a chat request for the call's only completion."""
        options = _options(spec)
        body: dict[str, Any] = {**options.extra_body, "model": options.model, "messages": _messages(call, options)}
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        if options.answer_format == "json":
            body["response_format"] = _response_format(options)
        return WireRequest(msgspec.json.encode(body), path=PATH)

    def decode(self, body: bytes, *, call: RewardCall, spec: EndpointSpec) -> list[Verdict]:
        """Return one verdict from the judge's answer, with the end of its text or reasoning as the detail.

        Raises:
            InvalidAnswerError: The answer was cut, has no clear score, or has a score that is not on the scale.
        """
        options = _options(spec)
        content = _content(body)
        if options.answer_format == "json":
            score, components, detail = _from_json(content)
        else:
            score, components, detail = _from_text(content, options), {}, content
        if not options.min_score <= score <= options.max_score:
            scale = f"{plain(options.min_score)} to {plain(options.max_score)}"
            raise InvalidAnswerError(f"the judge's score {plain(score)} is not on the scale from {scale}")
        value = (score - options.min_score) / (options.max_score - options.min_score)
        return [Verdict("scored", value, _end_of(detail), {**components, "score": score})]


def _options(spec: EndpointSpec) -> JudgeOptions:
    assert spec.openai_judge is not None  # EndpointSpec checks it
    return spec.openai_judge


def _messages(call: RewardCall, options: JudgeOptions) -> list[dict[str, str]]:
    values = {"prompt": _text(call.prompts[0]), "completion": _text(call.completions[0])}
    for column in options.columns:
        value: object = call.columns[column][0]
        values[column] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    asked = PLACEHOLDER.sub(lambda found: values[found[1]], options.rubric)
    messages = [{"role": "user", "content": f"{asked}\n\n{_how_to_answer(options)}"}]
    if options.system_prompt:
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    return messages


def _how_to_answer(options: JudgeOptions) -> str:
    scale = f"a number from {plain(options.min_score)} (worst) to {plain(options.max_score)} (best)"
    if options.answer_format == "json":
        return f'Answer with a JSON object: "reasoning", a short text, and then "score", {scale}.'
    return f"Give your reasons briefly. Then end with one line that has nothing but 'Score: N', where N is {scale}."


def _response_format(options: JudgeOptions) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"reasoning": {"type": "string"}, "score": {"type": "number"}},
        "required": ["reasoning", "score"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def _content(body: bytes) -> str:
    """Return the text that the judge wrote; raises InvalidAnswerError if it is missing or was cut."""
    choices: object = as_object(parse_json(body), what="the answer").get("choices")
    if not isinstance(choices, list) or not choices:
        raise InvalidAnswerError("the answer has no choices, so it is not a chat completion")
    choice = as_object(cast("list[object]", choices)[0], what="the choice")
    message = as_object(choice.get("message"), what="the message")
    content: object = message.get("content")
    finish_reason: object = choice.get("finish_reason")
    if finish_reason == "length":
        raise InvalidAnswerError("the judge's answer was cut at max_tokens; allow more of them")
    if finish_reason not in (None, "stop"):
        raise InvalidAnswerError(f"the judge's answer was cut: its finish_reason is {_shown(str(finish_reason))}")
    if isinstance(content, str) and content.strip():
        return content
    refusal: object = message.get("refusal")
    if isinstance(refusal, str):
        raise InvalidAnswerError(f"the judge refused: {_shown(refusal)}")
    raise InvalidAnswerError("the judge's answer has no text")


def _from_text(content: str, options: JudgeOptions) -> float:
    """Return the number on the last line "Score: N" of the judge's text; raises InvalidAnswerError without one."""
    lines = _SCORE_LINE.findall(content)
    if not lines:
        raise InvalidAnswerError(f"the judge's answer has no line 'Score: N': ...{_shown(content[-_CUT_CHARACTERS:])}")
    line = str(lines[-1])
    number = _NUMBER.match(line)
    if number is None or not _AFTER.fullmatch(line, number.end()):
        raise InvalidAnswerError(f"the judge's score is not a plain number: {_shown(line)}")
    if number[2] is not None and float(number[2]) != options.max_score:
        raise InvalidAnswerError(f"the judge's score is out of {number[2]}, not of {plain(options.max_score)}")
    return float(number[1])


def _from_json(content: str) -> tuple[float, dict[str, float], str]:
    """Return the score, all numbers by name, and the reasoning in the judge's JSON; raises InvalidAnswerError."""
    fenced = _FENCED.match(content)
    try:
        found = parse_json(content if fenced is None else fenced[1], what="the judge's answer")
    except InvalidAnswerError as error:
        raise InvalidAnswerError(f"{error}: {_shown(content)}") from error
    verdict = as_object(found, what="the judge's answer")
    score = finite(verdict.get("score"))
    if score is None:
        raise InvalidAnswerError(f"the judge's answer has no number called score: {_shown(content)}")
    named = {name: number for name, value in verdict.items() if (number := finite(value)) is not None}
    components = {component_name(name): number for name, number in list(named.items())[: MAX_COMPONENTS - 1]}
    reasoning: object = verdict.get("reasoning")
    return score, components, reasoning if isinstance(reasoning, str) else content


def _text(messages: Completion) -> str:
    """Return a conversation as ``role: content`` paragraphs, and a single message as its content."""
    if isinstance(messages, str):
        return messages
    if len(messages) == 1:
        return chat_text(messages[0])
    return "\n\n".join(f"{message.get('role', '')}: {chat_text(message)}" for message in messages)


def _shown(text: str) -> str:
    return printable(" ".join(text[:_CUT_CHARACTERS].split()))


def _end_of(text: str) -> str:
    """Return a text short enough for a verdict's detail. A long text keeps its end, where score and reasons are."""
    line = " ".join(text.split())
    return printable(line if len(line) <= MAX_DETAIL_CHARS else f"...{line[3 - MAX_DETAIL_CHARS :]}")
