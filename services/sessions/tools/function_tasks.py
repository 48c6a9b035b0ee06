"""The workers' kind of task in which a user's function is called, whatever it is called with."""

import msgspec

from services.sessions.tools.tool_answer import ToolAnswer
from shared.user_code.function_loading import load_function, read_function
from shared.user_code.module_sources import Sources
from shared.user_code.places import Places
from shared.user_code.task_kind import Function


class FunctionTasks(msgspec.Struct, frozen=True):
    """See TaskKind. Modules may come from ``places``."""

    places: Places

    @property
    def answer_type(self) -> type[ToolAnswer]:
        """See TaskKind."""
        return ToolAnswer

    def set_up(self) -> None:
        """See TaskKind."""

    def load(self, name: str, sources: Sources | None) -> Function:
        """See TaskKind."""
        return load_function(name, places=self.places, sources=sources)

    def read(self, name: str) -> tuple[Function, Sources | None]:
        """See TaskKind."""
        return read_function(name, places=self.places)
