"""Options of agents: tools, an environment or a program of the user, and how the model's calls are read."""

from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Positive, Section

MAX_TOOLS = 128
AGENTIC: Final = ("tools", "mcp_servers", "environment_factory", "agent")
"""Options that make the sessions service play the rollouts."""
_DEFAULT_PARSER = "hermes"


class AgentOptions(Section):
    """Options of a run whose rollouts have several turns."""

    tools: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
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
    environment_factory: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Class or function that makes an environment for each rollout, 'package.module:name', whose public "
        "methods are tools; or the URL of an OpenEnv server",
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
        description=f"vLLM's parser of tool calls, which must fit the model; {_DEFAULT_PARSER} if left out",
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
        """The first option that makes it so."""
        return next((name for name in AGENTIC if getattr(self, name)), None)

    def parser_of_tool_calls(self) -> str:
        """Return the name of the parser that reads the model's tool calls."""
        return self.tool_call_parser or _DEFAULT_PARSER
