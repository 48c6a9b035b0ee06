"""Defines how worker processes call users' tools, which are Python functions, and make their JSON schemas."""

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
    """Describes a usable tool: its schema, in OpenAI's format, and its module's version (None without a file)."""

    schema: dict[str, Any]
    sources: Sources | None


ToolPool = WorkerPool[ToolAnswer, DescribedTool]


class ToolTasks(FunctionTasks, frozen=True):
    """The task of the workers for tools: load a Python function from the allowed ``places``, and call it."""

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules to import once for all workers: this one, and transformers' conversion to JSON schemas."""
        return __name__, IMPORTS

    @property
    def description_type(self) -> type[DescribedTool]:
        """The type that ``describe`` returns for a usable function."""
        return DescribedTool

    def call(self, name: str, function: Function, call: msgspec.Raw, limits: Limits) -> ToolAnswer:
        """Call a tool. ``call`` is the encoded text of a JSON object with the keyword arguments."""
        return answer(function, msgspec.msgpack.decode(call, type=str), limits)

    def describe(
        self, name: str, function: Function, sources: Sources | None, kwargs: Mapping[str, Any]
    ) -> DescribedTool | Refused:
        """Make the tool's JSON schema, or refuse a function without type hints or a docstring."""
        try:
            return DescribedTool(tool_schema(name, function), sources)
        except UserError as error:
            return Refused(str(error))
