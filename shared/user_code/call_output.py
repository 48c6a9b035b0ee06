"""Limits the output of users' functions, so that it cannot fill their service's log: the rest is dropped.

    print(...) --> [at most MAX_CHARS a call] --> the service's own output --> its log

Programs that a function starts write to the service's output themselves, and are not limited here.
"""

import io
import sys
from typing import Any, Final, cast

MAX_CHARS: Final = 1 << 16
"""Most characters of a call, on standard output and standard error each."""


class CallOutput(io.TextIOWrapper):
    """A text stream that drops what a call prints beyond its first characters.

    Args:
        stream: The stream whose place it takes.
        max_chars: Most characters of a call.
    """

    def __init__(self, stream: io.TextIOWrapper, *, max_chars: int = MAX_CHARS) -> None:
        super().__init__(stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
        self._stream = stream  # which would close the buffer when it is deleted
        self._max_chars = max_chars
        self._num_left = max_chars

    def begin_call(self) -> None:
        """Reset the character count, because the next call begins."""
        self._num_left = self._max_chars

    def write(self, text: str, /) -> int:
        """Write the text as far as the call's limit allows. Returns its whole length, as if all were written."""
        if self._num_left >= 0:
            super().write(text[: self._num_left])
            self._num_left -= len(text)
            if self._num_left < 0:
                super().write(
                    f"\n[The first {self._max_chars} characters that a call printed. The rest was dropped.]\n"
                )
        return len(text)


def limit_output() -> list[CallOutput]:
    """Replace this process's standard output and standard error by CallOutputs, and return these."""
    outputs: list[CallOutput] = []
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            outputs.append(CallOutput(cast("io.TextIOWrapper", stream)))
            setattr(sys, name, outputs[-1])
    return outputs
