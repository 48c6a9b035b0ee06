"""Text of other people's on a terminal: shown as it is, and never obeyed.

A completion may hold an escape sequence that clears the screen, a function's name a `:boom:` that rich would draw.
"""

import unicodedata

from rich.console import Console

_OBEYED = {"Cc", "Cs"}
"""Control characters; surrogates, which UTF-8 cannot carry."""


def console(*, pipe_width: int) -> Console:
    """Return a console; without a terminal its lines are ``pipe_width`` long."""
    found = Console(emoji=False)
    return found if found.is_terminal else Console(emoji=False, width=pipe_width)


def printable(text: str) -> str:
    r"""Return text whose control characters are written out, such as ``\x1b``; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _OBEYED and character not in "\n\t"
        else character
        for character in text
    )
