"""An agent program: asks the policy with OpenAI's client, runs its tool calls, and has it check its own answer.

Use it in a run file as ``agent: agent_program:run``, with ``headrace up`` started in this directory.
gsm8k-agent-qwen3-0.6b.yaml is such a run file.
"""

import json
from typing import Any

from calculator import calculate
from openai import AsyncOpenAI

_PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculate", "description": calculate.__doc__, "parameters": _PARAMETERS}}
]
_CHECK = "Check your answer with the calculator, and put the final number within \\boxed{}."


async def run(base_url: str, api_key: str, prompt: list[Any], **row: Any) -> None:
    """Play one rollout. The run's reward functions score it, so no reward is returned."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = await _answer(client, prompt)
        await _answer(client, [*messages, {"role": "user", "content": _CHECK}])


async def _answer(client: AsyncOpenAI, messages: list[Any]) -> list[Any]:
    """Return the conversation with the policy's answer, after at most four turns with tool calls."""
    for _ in range(5):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=_TOOLS)
        said: Any = completion.choices[0].message
        messages = [*messages, said, *(_result(call) for call in said.tool_calls or ())]
        if not said.tool_calls:
            break
    return messages


def _result(call: Any) -> dict[str, str]:
    try:
        content = str(calculate(**json.loads(call.function.arguments)))
    except Exception as error:  # noqa: BLE001  the policy reads what was wrong with its call
        content = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}
