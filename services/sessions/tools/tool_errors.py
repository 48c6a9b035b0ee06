"""How a call of a tool fails: with an error that the model is answered with, or without any answer."""


class ToolError(Exception):
    """The text of an exception of a tool, or of a call that no tool takes. The model is answered with it."""


class ToolLostError(Exception):
    """A call without a result: the tool did not end, or ended its process, or no process was free."""
