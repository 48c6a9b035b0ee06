"""Writes chat messages as text, for people and for judge models.

{"content": "Let me see.", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
-->
Let me see.
add({"a": 1})
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast


def chat_text(message: Mapping[str, Any]) -> str:
    """Return a message's content, then one line for each tool call. Of a list of parts, only the texts are used."""
    content: object = message.get("content")
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    parts: Sequence[object] = cast("list[object]", content) if isinstance(content, list) else [content]
    texts = (cast("dict[str, object]", part).get("text") if isinstance(part, dict) else part for part in parts)
    said = [text for text in texts if isinstance(text, str) and text]
    return "\n".join([*said, *map(_call_text, calls)])


def _call_text(call: Mapping[str, Any]) -> str:
    function: Mapping[str, Any] = call.get("function", {})
    arguments: object = function.get("arguments", "")
    return f"{function.get('name', '?')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"
