"""Options of agents: the tools and the environment whose methods the model may call, and how its calls are read."""

from typing import Annotated

from pydantic import Field, field_validator

from shared.run_options.section import Positive, Section

MAX_TOOLS = 128
_DEFAULT_PARSER = "hermes"


class AgentOptions(Section):
    """Options of a run whose rollouts have several turns."""

    tools: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
        default=[],
        max_length=MAX_TOOLS,
        description="Functions that the model may call, 'package.module:function' with type hints and a Google "
        "docstring",
    )
    environment_factory: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Class or function that makes an environment for each rollout, 'package.module:name'; its public "
        "methods are tools",
    )
    max_tool_calling_iterations: int | None = Field(
        default=None, ge=1, description="Most turns of a rollout that call tools; no limit if left out"
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

    @field_validator("tools")
    @classmethod
    def _tools_are_distinct(cls, tools: list[str]) -> list[str]:
        if doubles := sorted({tool for tool in tools if tools.count(tool) > 1}):
            raise ValueError(f"{', '.join(doubles)} is listed twice; list each tool once")
        return tools

    @property
    def is_agentic(self) -> bool:
        """Whether the sessions service plays the rollouts. Generators read the prompts of all other runs themselves."""
        return bool(self.tools or self.environment_factory)

    def parser_of_tool_calls(self) -> str:
        """Return the name of the parser that reads the model's tool calls."""
        return self.tool_call_parser or _DEFAULT_PARSER
