"""The demo's tasks, as far as they differ. Both are about reversing strings (task.py).

    reverse   "reverse kfjwq ="  -->  "qwjfk"
    tools     "reverse kfjwq ="  -->  a call of `reverse`  -->  its result  -->  "qwjfk"

In the second task the teacher calls the tool whenever it gives the right answer. So the warmed-up model can call it,
but mostly does so for the shortest strings only, and GRPO has to find out that calling pays.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.demo.settings import RUN_OPTIONS
from headrace.demo.task import Example, reversal, row_of
from headrace.demo.tools import reverse

_FRAME = ("reverse ", " =")
_TOOLS = "<tools>reverse</tools>"
_CALL = ('<tool_call>\n{"name": "reverse", "arguments": {"text": "', '"}}\n</tool_call>')
_RESPONSE = ("<tool_response>", "</tool_response>")
_CALL_PATTERN = re.compile("{}(.*){}".format(*map(re.escape, _CALL)))
_CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<tools>' + tool.function.name + '</tools>' }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}"
    "{% else %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Piece:
    """A part of a text to imitate. The loss counts only what the teacher wrote."""

    text: str
    is_learned: bool


class ReverseTask:
    """Reverse a string without help."""

    name = "reverse"
    title = "reversing strings"
    frame: tuple[str, ...] = _FRAME
    """The texts of more than one letter that are one token."""
    chat_template: str | None = None
    allowed_modules: Mapping[str, str] = {"HEADRACE_REWARD_MODULES": "headrace.demo.reward"}
    """The modules whose functions the services may call, by environment variable."""
    run_options: Mapping[str, Any] = RUN_OPTIONS

    def row(self, example: Example) -> dict[str, Any]:
        """Return the dataset row."""
        return row_of(example)

    def text_of(self, prompt: str) -> str:
        """Return what the model reads first."""
        return prompt

    def lesson(self, example: Example, *, eos: str) -> list[Piece]:
        """Return what the teacher writes, whose answer is the example's."""
        return [Piece(self.text_of(example.prompt), is_learned=False), Piece(example.answer + eos, is_learned=True)]

    def reply(self, completion: str) -> str | None:
        """Return what the model reads after this completion; None if the completion is the answer."""
        del completion
        return None


class ToolsTask(ReverseTask):
    """Reverse a string by calling a tool."""

    name = "tools"
    title = "reversing strings with a tool"
    frame = (_TOOLS, *_CALL, *_RESPONSE, *_FRAME)
    chat_template = _CHAT_TEMPLATE
    allowed_modules: Mapping[str, str] = {
        **ReverseTask.allowed_modules,
        "HEADRACE_TOOL_MODULES": "headrace.demo.tools",
    }
    run_options: Mapping[str, Any] = {
        **RUN_OPTIONS,
        "tools": ["headrace.demo.tools:reverse"],
        "max_tool_calling_iterations": 2,
        "max_completion_length": 28,
    }

    def row(self, example: Example) -> dict[str, Any]:
        """Return a row whose prompt is a conversation, as tools need one."""
        return row_of(example) | {"prompt": [{"role": "user", "content": example.prompt}]}

    def text_of(self, prompt: str) -> str:
        """Return what the chat template makes of the prompt and the tool."""
        return _TOOLS + prompt

    def lesson(self, example: Example, *, eos: str) -> list[Piece]:
        """Return a lesson with a call before the answer if the answer is right."""
        prompt, answer = super().lesson(example, eos=eos)
        letters = example.prompt.removeprefix(_FRAME[0]).removesuffix(_FRAME[1])
        if example.answer != reversal(letters).answer:
            return [prompt, answer]
        call = letters.join(_CALL)
        response = self.reply(call)
        assert response is not None
        return [prompt, Piece(call + eos, is_learned=True), Piece(response, is_learned=False), answer]

    def reply(self, completion: str) -> str | None:
        """Return the tool's result, as the chat template renders it."""
        call = _CALL_PATTERN.fullmatch(completion)
        return None if call is None else reverse(call[1]).join(_RESPONSE)


TASKS: dict[str, ReverseTask] = {task.name: task for task in (ReverseTask(), ToolsTask())}
REVERSE = TASKS["reverse"]
