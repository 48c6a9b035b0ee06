"""Joins the tools of one run: Python functions and tools of MCP servers, by the names that the model uses."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.sessions.tools.tool_answer import ListResult
from services.sessions.tools.tool_errors import ToolError
from shared.errors import UserError


class ToolSource(Protocol):
    """Tools of one kind: functions (user_tools.py), or tools of an MCP server (mcp_tools.py)."""

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the tools, in OpenAI's format."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> str | ListResult:
        """Call a tool and return its result.

        Raises:
            ToolError: The tool raised an exception.
            ToolLostError: The call has no result.
        """
        ...


class JoinedTools:
    """All tools of one run, from several sources. A call goes to the source that has the tool.

    Args:
        sources: The sources, by their names in messages for users.

    Raises:
        UserError: Two tools have the same name.
    """

    def __init__(self, sources: Mapping[str, ToolSource]) -> None:
        require_distinct({where: source.schemas for where, source in sources.items()})
        self._sources = {_name(schema): source for source in sources.values() for schema in source.schemas}
        self.schemas = [schema for source in sources.values() for schema in source.schemas]
        """The JSON schemas of the tools, in OpenAI's format."""

    @property
    def is_over(self) -> bool:
        """Return False: these tools take calls as long as the policy makes them."""
        return False

    def keeps_state(self, name: str) -> bool:
        """Return False: the results of these tools do not depend on a rollout's earlier calls."""
        del name
        return False

    async def call(self, name: str, arguments: dict[str, Any]) -> str | ListResult:
        """Call a tool and return its result: text, or a ListResult for a list.

        Raises:
            ToolError: The run does not have this tool, or the tool raised an exception.
            ToolLostError: The call has no result.
        """
        source = self._sources.get(name)
        if source is None:
            raise ToolError(f"Tool {name} not found.")
        return await source.call(name, arguments)


def require_distinct(schemas: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Raise UserError if two tools have the same name.

    Args:
        schemas: The tools' JSON schemas, by the name of their source in the message.
    """
    places: dict[str, list[str]] = {}
    for where, found in schemas.items():
        for schema in found:
            places.setdefault(_name(schema), []).append(where)
    if twice := {name: found for name, found in places.items() if len(found) > 1}:
        which = "; ".join(f"{' and '.join(found)} have a tool {name}" for name, found in twice.items())
        raise UserError(f"{which}, and the model could not tell them apart: rename one of them")


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["function"]["name"])
