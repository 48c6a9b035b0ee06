"""Calls tools in workers, and describes them: the workers' kind of task."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.sessions.tools.function_tasks import FunctionTasks
from services.sessions.tools.tool_answer import ToolAnswer, answer
from services.sessions.tools.tool_schema import IMPORTS, tool_schema
from shared.errors import UserError
from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.task_kind import Function
from shared.user_code.worker_frames import Refused
from shared.user_code.worker_pool import WorkerPool


class DescribedTool(msgspec.Struct, frozen=True, tag=True):
    """The schema of a tool in OpenAI's format, and the version of its module; None for a module without a file."""

    schema: dict[str, Any]
    sources: Sources | None


ToolPool = WorkerPool[ToolAnswer, DescribedTool]


class ToolTasks(FunctionTasks, frozen=True):
    """See TaskKind. Modules of tools may come from ``places``."""

    @property
    def preload(self) -> tuple[str, ...]:
        """See TaskKind."""
        return __name__, IMPORTS

    @property
    def description_type(self) -> type[DescribedTool]:
        """See TaskKind."""
        return DescribedTool

    def call(self, name: str, function: Function, call: msgspec.Raw, limits: Limits) -> ToolAnswer:
        """See TaskKind. ``call`` is text: a JSON object with the keyword arguments."""
        return answer(function, msgspec.msgpack.decode(call, type=str), limits)

    def describe(
        self, name: str, function: Function, sources: Sources | None, kwargs: Mapping[str, Any]
    ) -> DescribedTool | Refused:
        """See TaskKind."""
        try:
            return DescribedTool(tool_schema(name, function), sources)
        except UserError as error:
            return Refused(str(error))
