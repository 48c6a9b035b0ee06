"""The fenced blocks of a completion, in one pass over its lines, however many of them look like the start of one."""

import re
from dataclasses import dataclass

_OPENING = re.compile(r"[ \t]*```[ \t]*(?P<language>[\w+-]*)")
_CLOSING = re.compile(r"[ \t]*```[ \t]*")


@dataclass(frozen=True)
class Block:
    """What stands between two fences; ``language`` is the first word after the opening one, in lower case."""

    language: str
    content: str


def fenced_blocks(text: str) -> list[Block]:
    """Return the blocks that are closed, in their order."""
    blocks: list[Block] = []
    language: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if language is None:
            if opening := _OPENING.match(line):
                language, lines = opening["language"].lower(), []
        elif _CLOSING.fullmatch(line):
            blocks.append(Block(language, "".join(f"{kept}\n" for kept in lines)))
            language = None
        else:
            lines.append(line)
    return blocks
