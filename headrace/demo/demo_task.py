"""The demo's two tasks: reverse a string directly, or by calling a tool. The strings come from task.py.

    reverse   "reverse kfjwq ="  -->  "qwjfk"
    tools     "reverse kfjwq ="  -->  a call of `reverse`  -->  its result  -->  "qwjfk"

Before GRPO, a warm-up makes the model imitate a careless teacher. In the second task, the teacher calls the tool
whenever it gives the right answer. So the warmed-up model can call the tool, but mostly does so for the shortest
strings only, and GRPO has to find out that calling pays.
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
    """A part of a text that the warm-up imitates. Only the parts that the teacher wrote count in the loss."""

    text: str
    is_learned: bool


class ReverseTask:
    """The demo's first task: the model itself writes a string backwards."""

    name = "reverse"
    title = "reversing strings"
    frame: tuple[str, ...] = _FRAME
    """The texts of more than one letter that are one token."""
    chat_template: str | None = None
    allowed_modules: Mapping[str, str] = {"HEADRACE_REWARD_MODULES": "headrace.demo.reward"}
    """The modules whose functions the services may call, by environment variable."""
    run_options: Mapping[str, Any] = RUN_OPTIONS

    def row(self, example: Example) -> dict[str, Any]:
        """Return the dataset row of an example, with a prompt of plain text."""
        return row_of(example)

    def text_of(self, prompt: str) -> str:
        """Return the text that the model is conditioned on: here the prompt itself."""
        return prompt

    def lesson(self, example: Example, *, eos: str) -> list[Piece]:
        """Return the text that the warm-up imitates: the prompt, then the teacher's answer, which ends with ``eos``."""
        return [Piece(self.text_of(example.prompt), is_learned=False), Piece(example.answer + eos, is_learned=True)]

    def reply(self, completion: str) -> str | None:
        """Return the text that the model reads after a completion: here None, as the completion is the answer."""
        del completion
        return None


class ToolsTask(ReverseTask):
    """The demo's second task: the model writes a string backwards by calling a tool."""

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
        """Return the dataset row of an example, with a conversation as its prompt, as runs with tools need it."""
        return row_of(example) | {"prompt": [{"role": "user", "content": example.prompt}]}

    def text_of(self, prompt: str) -> str:
        """Return the prompt as the chat template renders it, after the declaration of the tool."""
        return _TOOLS + prompt

    def lesson(self, example: Example, *, eos: str) -> list[Piece]:
        """Return the text that the warm-up imitates. A right answer comes after a call of the tool and its result."""
        prompt, answer = super().lesson(example, eos=eos)
        letters = example.prompt.removeprefix(_FRAME[0]).removesuffix(_FRAME[1])
        if example.answer != reversal(letters).answer:
            return [prompt, answer]
        call = letters.join(_CALL)
        response = self.reply(call)
        assert response is not None
        return [prompt, Piece(call + eos, is_learned=True), Piece(response, is_learned=False), answer]

    def reply(self, completion: str) -> str | None:
        """Return the tool's result as the chat template renders it, or None if the completion is not a call."""
        call = _CALL_PATTERN.fullmatch(completion)
        return None if call is None else reverse(call[1]).join(_RESPONSE)


TASKS: dict[str, ReverseTask] = {task.name: task for task in (ReverseTask(), ToolsTask())}
REVERSE = TASKS["reverse"]
