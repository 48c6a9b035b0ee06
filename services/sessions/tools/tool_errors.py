"""How a call of a tool fails: with an error that the model is answered with, or without any answer."""


class ToolError(Exception):
    """A tool raised an exception, or no tool takes the call. The model gets the message as the tool's result."""


class ToolLostError(Exception):
    """A call without a result: the tool did not end, or ended its process, or no process was free."""
