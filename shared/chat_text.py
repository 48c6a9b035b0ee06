"""Writes chat messages as text, for people and judges.

{"content": "Let me see.", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
-->
Let me see.
add({"a": 1})
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def chat_text(message: Mapping[str, Any]) -> str:
    """Return a message's content, followed by its tool calls, one a line."""
    content: object = message.get("content")
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    said = [content] if isinstance(content, str) and content else []
    return "\n".join([*said, *map(_call_text, calls)])


def _call_text(call: Mapping[str, Any]) -> str:
    function: Mapping[str, Any] = call.get("function", {})
    arguments: object = function.get("arguments", "")
    return f"{function.get('name', '?')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"
