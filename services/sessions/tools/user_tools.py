"""Runs the Python functions of a run's user that the policy may call as tools, in worker processes.

    names --inspect, in processes of their own--> schemas, and the version of each module
    a call of the policy --worker, under a deadline--> text for the model       the tool returned
                                                       ToolError                it raised: answered to the model
                                                       ToolLostError            no answer: the rollout is lost

All calls of a run use the version of the modules that was inspected. A tool keeps no state between two calls: each may
run in another worker. A call whose worker died is made again once, so a tool may run twice.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from services.sessions.tools.tool_answer import ListResult
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from services.sessions.tools.tool_tasks import DescribedTool, ToolPool
from shared.errors import UserError
from shared.user_code.call_failure import CallFailure
from shared.user_code.worker_frames import Refused

log = logging.getLogger(__name__)

_MAX_TRACES = 1000
"""Each failure of a tool is logged once, with its trace. The set of logged failures is cleared at this size."""


class UserTools:
    """The Python functions that the policy of one run may call. Create it with ``load``."""

    def __init__(
        self, tools: Mapping[str, tuple[str, DescribedTool]], pool: ToolPool, *, lane: str, tool_timeout_s: float
    ) -> None:
        self._tools = tools
        self._pool = pool
        self._lane = lane
        self._tool_timeout_s = tool_timeout_s
        self._logged: set[tuple[str, str]] = set()

    @classmethod
    async def load(
        cls, names: Sequence[str], pool: ToolPool, *, lane: str, tool_timeout_s: float, check_timeout_s: float
    ) -> Self:
        """Import the tools from their current files, in separate processes, and read their schemas.

        Args:
            names: The functions, each as ``package.module:function``.
            pool: The worker processes.
            lane: The run's id, or ``check`` for a run that is being submitted. Worker processes serve lanes in turn.
            tool_timeout_s: Deadline of one call, in seconds.
            check_timeout_s: Deadline of importing a module, in seconds.

        Raises:
            UserError: Some tools cannot be used. The message names each of them, and says what to do.
        """
        found = await asyncio.gather(*(pool.inspections.inspect(name, timeout_s=check_timeout_s) for name in names))
        refused = [what.detail for what in found if isinstance(what, Refused)]
        if refused:
            raise UserError("; ".join(refused))
        described = [what for what in found if isinstance(what, DescribedTool)]
        called = [str(what.schema["function"]["name"]) for what in described]
        twice = [
            f"{called.count(name)} tools are called {name}" for name, count in Counter(called).items() if count > 1
        ]
        if twice:
            raise UserError(f"{'; '.join(twice)}, and the model could not tell them apart: rename the functions")
        tools = dict(zip(called, zip(names, described, strict=True), strict=True))
        return cls(tools, pool, lane=lane, tool_timeout_s=tool_timeout_s)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, in OpenAI's format."""
        return [what.schema for _, what in self._tools.values()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | ListResult:
        """Call the tool that the model calls ``name``; return its result.

        Raises:
            ToolError: The run does not have this tool, or the tool raised an exception.
            ToolLostError: The call has no result.
        """
        if name not in self._tools:
            raise ToolError(f"Tool {name} not found.")
        function, what = self._tools[name]
        call = msgspec.msgpack.encode(json.dumps(arguments))  # as text, because JSON's integers may have any length
        try:
            answer, _ = await self._pool.call(
                function, call, lane=self._lane, timeout_s=self._tool_timeout_s, sources=what.sources
            )
        except CallFailure as failure:
            self._log_once(name, failure.outcome, failure.detail)
            raise ToolLostError(f"tool {name}: {failure.detail}") from failure
        if answer.ended == "raised":
            self._log_once(name, answer.origin, answer.trace)
            raise ToolError(answer.text)
        return answer.result

    def _log_once(self, name: str, failure: str, details: str) -> None:
        if len(self._logged) >= _MAX_TRACES:
            self._logged.clear()
        if (name, failure) not in self._logged:
            self._logged.add((name, failure))
            log.warning("tool %s: %s (logged once)", name, details)
