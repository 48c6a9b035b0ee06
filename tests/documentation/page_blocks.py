"""The blocks of code on the pages, and why one is not run.

<!-- not run: needs the hub -->        the marker, in the line before the block; a reader of the page does not see it
```python
dataset = load_dataset(...)
```
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for place in ("docs", "examples", "deploy") for path in sorted((ROOT / place).rglob("*.md"))),
)
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>.+?) -->\n)?^(?P<indent>[ ]*)(?P<fence>```+)(?P<language>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"(?:\$ |headrace |make |python3? |redis-cli |docker |kubectl |helm |cp )")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Args:
        page: Its page, as a path in the repository.
        line: The line of its first fence.
        language: The word after the fence; ``text`` if there is none.
        text: The code, without the fences.
        reason: Why it is not run, if a marker says so.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        """Return the place, for messages and ids of tests."""
        return f"{self.page}:{self.line}"

    @property
    def shell(self) -> str:
        """The commands in it: all lines, or those after a ``$``; empty if there are none."""
        if self.language in ("bash", "sh"):
            return self.text
        if self.language != "text" or not _COMMAND.match(self.text):
            return ""
        typed = re.findall(r"^\$ (.*)$", self.text, re.MULTILINE)
        return "\n".join(typed) if typed else self.text


def blocks_of(page: Path) -> Iterator[Block]:
    """Return the blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        fence = found.start("indent")
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, fence) + 1,
            language=found["language"] or "text",
            text=re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            reason=found["reason"] or "",
        )


def text_without_blocks(page: Path) -> str:
    """Return the sentences of a page."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))
