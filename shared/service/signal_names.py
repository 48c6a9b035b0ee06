"""Names signals for people. Python has no name for most real-time signals, which kill processes too."""

import signal


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 42`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
