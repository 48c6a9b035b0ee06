"""The two errors of a tool call: ToolError is answered to the model, and ToolLostError ends the rollout as lost."""


class ToolError(Exception):
    """A tool raised an exception, or no tool takes the call. The model gets the message as the tool's result."""


class ToolLostError(Exception):
    """A tool call has no result, for example because the tool did not end in time. The rollout is lost."""
