"""Finds the fenced code blocks of a completion in one pass over its lines, so the time is linear for every text."""

import re
from dataclasses import dataclass

_OPENING = re.compile(r"[ \t]*```[ \t]*(?P<language>[\w+-]*)")
_CLOSING = re.compile(r"[ \t]*```[ \t]*")


@dataclass(frozen=True)
class Block:
    """A code block between two lines of three backticks.

    ``language`` is the first word after the opening backticks, in lower case, or empty.
    """

    language: str
    content: str


def fenced_blocks(text: str) -> list[Block]:
    """Return the closed code blocks, in order. Their lines end with LF, even if the text has CRLF."""
    blocks: list[Block] = []
    language: str | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if language is None:
            if opening := _OPENING.match(line):
                language, lines = opening["language"].lower(), []
        elif _CLOSING.fullmatch(line):
            blocks.append(Block(language, "".join(f"{kept}\n" for kept in lines)))
            language = None
        else:
            lines.append(line)
    return blocks
