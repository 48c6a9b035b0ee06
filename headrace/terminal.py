"""Prints untrusted text on a terminal without interpreting it.

A completion may contain an escape sequence that clears the screen, or a function's name a `:boom:` that rich would
draw as an emoji.
"""

import json
import sys
import unicodedata
from collections.abc import Mapping
from typing import Any

from rich.console import Console

_OBEYED = {"Cc", "Cs"}
"""Unicode categories that are escaped: control characters, and surrogates, which UTF-8 cannot encode."""


def console(*, pipe_width: int = 120) -> Console:
    """Return a rich Console without emoji codes. If it is not a terminal, it is ``pipe_width`` characters wide."""
    found = Console(emoji=False)
    return found if found.is_terminal else Console(emoji=False, width=pipe_width)


def printable(text: str) -> str:
    r"""Return the text with control characters and surrogates escaped, as ``\x1b``. Tabs and line breaks are kept."""
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _OBEYED and character not in "\n\t"
        else character
        for character in text
    )


def say_json(found: Mapping[str, Any]) -> int:
    """Print a dictionary as JSON over several lines, and return 0 as the command's exit status."""
    say(json.dumps(found, indent=2))
    return 0


def say(line: str) -> None:
    """Print a line with control characters escaped, and flush, so that it passes through a pipe at once."""
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def note(line: str) -> None:
    """Print a progress message on standard error, so that standard output has only the command's result."""
    sys.stderr.write(f"headrace: {printable(line)}\n")
    sys.stderr.flush()
