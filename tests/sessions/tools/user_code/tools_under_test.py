"""Tools as users write them, good and bad. Nothing here imports headrace."""

import asyncio
import os
import sys
import time
from typing import Any

_loops: set[asyncio.AbstractEventLoop] = set()


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


async def greet(name: str) -> str:
    """Greet somebody.

    Args:
        name: Who is greeted.
    """
    await asyncio.sleep(0)
    return f"Hello, {name}"


async def count_loops() -> int:
    """Count the event loops that this tool has run on."""
    _loops.add(asyncio.get_running_loop())
    return len(_loops)


def lookup(key: str) -> dict[str, Any]:
    """Look up a key.

    Args:
        key: The key.
    """
    return {"key": key, "found": None}


def fails(why: str) -> str:
    """Raise an exception.

    Args:
        why: Its message.
    """
    raise ValueError(why)


async def fails_later(why: str) -> str:
    """Raise an exception.

    Args:
        why: Its message.
    """
    await asyncio.sleep(0)
    raise ValueError(why)


def exits() -> str:
    """Exit, as a program does."""
    sys.exit(3)


def crashes() -> str:
    """End the process at once."""
    os._exit(7)


def hangs() -> str:
    """Never return."""
    while True:
        time.sleep(0.05)


async def hangs_async() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return "never"


def hog() -> int:
    """Need more memory than there is."""
    return len(bytearray(20 << 30))


def floods(num_characters: int) -> str:
    """Return a long text.

    Args:
        num_characters: Its length.
    """
    return "x" * num_characters


def prints(num_characters: int) -> str:
    """Print a long text.

    Args:
        num_characters: Its length.
    """
    sys.stdout.write("x" * num_characters)
    return "printed"


def without_docstring(a: int) -> int:
    return a


def without_argument_in_docstring(a: int) -> int:
    """Return it."""
    return a


def without_type_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Return it.

    Args:
        a: A number.
    """
    return a  # type: ignore[no-any-return]


def rows(last: float) -> list[tuple[str, float] | None]:
    """Return rows.

    Args:
        last: The last number.
    """
    return [("a", last), None]
