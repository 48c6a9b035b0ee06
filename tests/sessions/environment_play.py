"""Plays one rollout in an environment with scripted turns, and keeps its recording."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.sessions.environment_rollout import Environments, play_in_environment
from services.sessions.recording.recorded import Entry
from services.sessions.session import Session
from services.sessions.tool_rollout import Limits, ToolRollout
from shared.messages import Prompt, PromptGroup
from shared.turns import TurnRequest
from tests.groups import prompt_group
from tests.sessions.scripted import InProcessTools, ScriptedGenerators

PROMPT: Prompt = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Begin."}]


def group(prompt: Prompt = PROMPT, **columns: Any) -> PromptGroup:
    return msgspec.structs.replace(prompt_group(), prompt=prompt, prompt_ids=b"", columns={"start": 1} | columns)


def _twice(x: int) -> int:
    return 2 * x


class Play:
    """Plays one rollout and keeps everything that took part in it."""

    def __init__(
        self,
        environments: Environments,
        policy: Callable[[TurnRequest], Any],
        entries: Sequence[Entry] = (),
    ) -> None:
        self.environments = environments
        self.generators = ScriptedGenerators(policy)
        self.tools = InProcessTools(twice=_twice)
        self.limits = Limits(max_iterations=None, max_completion_length=100)
        self.entries = list(entries)
        self.session = Session(
            "00000000-0", run_id="run-test", generators=self.generators, record=self.record, entries=entries
        )

    async def record(self, number: int, entry: Entry) -> None:
        assert number == len(self.entries)
        self.entries.append(msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Entry))

    async def __call__(self, prompt: PromptGroup | None = None) -> ToolRollout:
        return await play_in_environment(
            self.session,
            prompt or group(),
            environments=self.environments,
            tools=self.tools,
            limits=self.limits,
        )


def said(rollout: ToolRollout) -> list[str]:
    return [message["content"] for message in rollout.completion]
