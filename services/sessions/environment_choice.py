"""Chooses the environment of each rollout by its row, as TRL does with a dictionary of factories.

    row {environment: "game", ...} --names--> the environments of "game" --> environment_rollout.py

A rollout has only the tools of its own environment. ``reset`` gets the row without the column that made the choice.
If a row names none of the environments, its rollouts are lost (not scored and not trained), with the reason.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.sessions.environment_rollout import Environments, play_in_environment
from services.sessions.session import Session
from services.sessions.tool_rollout import Limits, ToolRollout, Tools
from shared.messages import PlayedEnvironment, PromptGroup
from shared.run_options.agents import ENVIRONMENT_COLUMN, unknown_environment


class EnvironmentChoice:
    """Plays each rollout of a run in the environment that its row of the data set names.

    Args:
        by_name: Environments by the name in the rows' column ``environment``. The key None means that the run has only
            one type of environment, and rows need no such column.
    """

    def __init__(self, by_name: Mapping[str | None, Environments]) -> None:
        self._by_name = by_name

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools of all environments, each once."""
        found: list[dict[str, Any]] = []
        for environments in self._by_name.values():
            found += [schema for schema in environments.schemas if schema not in found]
        return found

    @property
    def all(self) -> tuple[Environments, ...]:
        """All types of environments of the run."""
        return tuple(self._by_name.values())

    async def play(self, session: Session, prompt: PromptGroup, *, tools: Tools, limits: Limits) -> ToolRollout:
        """Play a rollout in the environment of its row. Raises TurnRefusedError and GroupTakenError."""
        environments = self._by_name.get(None)
        if environments is None:
            name: object = prompt.columns.get(ENVIRONMENT_COLUMN)
            environments = self._by_name.get(name) if isinstance(name, str) else None
            if environments is None:
                # If no function rewards the rollouts, every environment has a reward.
                unknown = PlayedEnvironment(ENVIRONMENT_COLUMN, all(known.has_reward for known in self.all))
                names = [str(known) for known in self._by_name]
                return ToolRollout(lost=unknown_environment(prompt.columns, names), environment=unknown)
            columns = {column: value for column, value in prompt.columns.items() if column != ENVIRONMENT_COLUMN}
            prompt = msgspec.structs.replace(prompt, columns=columns)
        return await play_in_environment(session, prompt, environments=environments, tools=tools, limits=limits)
