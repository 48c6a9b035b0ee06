"""Run options for agents: tools, environments, agent programs, and vLLM's parser of tool calls."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Positive, Section

MAX_TOOLS = 128
ENVIRONMENT_COLUMN: Final = "environment"
"""The column that names a row's environment, if the run has several. TRL's name."""
AGENTIC: Final = ("tools", "mcp_servers", "environment_factory", "agent")
"""Options that make the sessions service play the rollouts."""
_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Table = Annotated[dict[_Name, _Name], Field(min_length=1, max_length=MAX_TOOLS)]


def unknown_environment(row: Mapping[str, object], names: Sequence[str]) -> str:
    """Return why the run has no environment for a row, as text that begins with a verb; empty if it has one."""
    name = row.get(ENVIRONMENT_COLUMN)
    if name in names:
        return ""
    known = ", ".join(names)
    if name is None:
        return f"names no environment in the column {ENVIRONMENT_COLUMN!r}; environment_factory has {known}"
    return f"has {ENVIRONMENT_COLUMN} {str(name)[:100]!r}, which is not among the environments of the run: {known}"


class AgentOptions(Section):
    """Options of agent runs: tools, environments, agent programs, and their limits."""

    tools: list[_Name] = Field(
        default=[],
        max_length=MAX_TOOLS,
        description="Functions that the model may call, 'package.module:function' with type hints and a Google "
        "docstring",
    )
    mcp_servers: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default=[],
        max_length=MAX_TOOLS,
        description="MCP servers whose tools the model may call, by their names in the sessions service's "
        "HEADRACE_MCP_CONFIG",
    )
    environment_factory: _Name | _Table | None = Field(
        default=None,
        description="Class or function that makes an environment for each rollout, 'package.module:name', whose public "
        "methods are tools; or the URL of an OpenEnv server; or a table of several by name, of which each row names "
        f"one in its column `{ENVIRONMENT_COLUMN}`",
    )
    max_tool_calling_iterations: int | None = Field(
        default=None, ge=1, description="Most turns of a rollout that call tools; no limit if left out"
    )
    agent: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Program that plays the rollouts: 'package.module:function', or the URL that it is asked at",
    )
    agent_timeout_s: Positive = Field(
        default=300.0, description="Longest silence of the agent program, in seconds; then its rollout is lost"
    )
    tool_timeout_s: Positive = Field(
        default=30.0, description="Deadline of a call of a tool or an environment, in seconds"
    )
    tool_call_parser: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="vLLM's parser of tool calls; if left out, one that reads what the chat template writes, or hermes",
    )

    @field_validator("tools", "mcp_servers")
    @classmethod
    def _they_are_distinct(cls, tools: list[str]) -> list[str]:
        if doubles := sorted({tool for tool in tools if tools.count(tool) > 1}):
            raise ValueError(f"{', '.join(doubles)} is listed twice; list each one once")
        return tools

    @model_validator(mode="after")
    def _an_agent_brings_its_own_tools(self) -> Self:
        others = [name for name in AGENTIC if name != "agent" and getattr(self, name)]
        if self.agent is not None and others:
            raise ValueError(
                f"agent and {' and '.join(others)} are set, but an agent program brings its own tools; keep only "
                "agent, or leave it out"
            )
        return self

    @property
    def is_agentic(self) -> bool:
        """Whether the sessions service plays the rollouts. Generators read the prompts of all other runs themselves."""
        return self.agentic_option is not None

    @property
    def agentic_option(self) -> str | None:
        """The first option that makes this an agent run; None if none does."""
        return next((name for name in AGENTIC if getattr(self, name)), None)

    def environment_factories(self) -> dict[str | None, str]:
        """Return the environment factories by name, or one under None if all rollouts use it; empty without any."""
        given = self.environment_factory
        if given is None:
            return {}
        return {None: given} if isinstance(given, str) else dict[str | None, str](given.items())

    def environment_names(self) -> tuple[str, ...]:
        """Return the names that rows may have in the column ``environment``; empty unless there are several."""
        return tuple(name for name in self.environment_factories() if name is not None)
