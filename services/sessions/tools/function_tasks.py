"""Loads users' Python functions in worker processes: the base class of the tasks for tools and agent programs."""

import msgspec

from services.sessions.tools.tool_answer import ToolAnswer
from shared.user_code.function_loading import load_function, read_function
from shared.user_code.module_sources import Sources
from shared.user_code.places import Places
from shared.user_code.task_kind import Function


class FunctionTasks(msgspec.Struct, frozen=True):
    """Loads a user's function from the allowed ``places``. Subclasses say how to call and how to describe it."""

    places: Places

    @property
    def answer_type(self) -> type[ToolAnswer]:
        """The type that ``call`` of the subclasses returns."""
        return ToolAnswer

    def set_up(self) -> None:
        """Do nothing: a worker process needs no preparation before it calls a function."""

    def load(self, name: str, sources: Sources | None) -> Function:
        """Load the function in the version ``sources``, or else from its module's current files."""
        return load_function(name, places=self.places, sources=sources)

    def read(self, name: str) -> tuple[Function, Sources | None]:
        """Load the function from its module's current files; return it with the files' version."""
        return read_function(name, places=self.places)
