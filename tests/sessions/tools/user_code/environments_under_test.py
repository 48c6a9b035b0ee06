"""Environments as users write them, good and bad. Nothing here imports headrace."""

import asyncio
import atexit
import os
import random
import time
import weakref
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np

__all__ = ["Counter"]
_made = 0


class Counter:
    """Counts up to the row's goal."""

    def __init__(self) -> None:
        global _made
        _made += 1
        self.count = self.goal = 0
        self._turns = asyncio.Lock()

    @property
    def trap(self) -> int:
        raise AssertionError("a property was evaluated")

    def reset(self, goal: int, **_: Any) -> str:
        self.count, self.goal = 0, goal
        return f"Count to {goal}."

    def add(self, number: int) -> str:
        """Add to the count.

        Args:
            number: The number to add.
        """
        if number < 0:
            raise ValueError("only upwards")
        self.count += number
        return f"{self.count} of {self.goal}"

    async def wait_and_add(self, number: int) -> str:
        """Add to the count, later.

        Args:
            number: The number to add.
        """
        async with self._turns:
            await asyncio.sleep(0)
        return self.add(number)

    def process(self) -> str:
        """Return the process and the number of environments that were made in it."""
        return f"{os.getpid()} {_made}"

    def hang(self) -> str:
        """Never return."""
        while True:
            time.sleep(0.05)

    def crash(self) -> str:
        """End the process at once."""
        os._exit(7)

    async def get_reward(self) -> float:
        return self.count / self.goal

    def _secret(self) -> str:
        return "not a tool"


class Quiet:
    def reset(self, **_: Any) -> None:
        return None


class NotJudged(Quiet):
    def get_reward(self) -> float | None:
        return None


class NotANumber(Quiet):
    def get_reward(self) -> float:
        return float("nan")


class Infinite(Quiet):
    def get_reward(self) -> float:
        return float("inf")


class ReturnsAList:
    def reset(self, **_: Any) -> list[str]:
        return ["text"]


class Attributes(Quiet):
    of_class = 0.5

    def __init__(self) -> None:
        self.text, self.done, self.pair, self.by_number = "\N{SNOWMAN}", np.True_, ("a", 1), {1: "one"}
        self.score, self.board = np.float32(1.5), np.array([[1, 2], [3, 4]])
        self.client, self.huge, self.letters, self.surrogate = asyncio, 1 << 64, {"a"}, "\ud800"
        self.not_a_number, self.large = float("nan"), "x" * 70_000
        self.deep: list[Any] = []
        for _ in range(31):  # the deepest value that would be too deep in the attributes
            self.deep = [self.deep]
        self._private = 1

    @property
    def of_property(self) -> str:
        return "seen"

    @property
    def broken(self) -> str:
        raise ValueError("no board")


class Aliased(Quiet):
    def guess(self) -> str:
        """Guess."""
        return "no"

    hint = guess


class SlowProperty(Quiet):
    @property
    def board(self) -> str:
        time.sleep(600)
        return ""


class Draws:
    def reset(self, **_: Any) -> None:
        self.python, self.numpy = random.random(), np.random.random()


def make_counter() -> Counter:
    return Counter()


class CleansUp:
    """Notes what clean-up code ran, and may stand still in it."""

    directory: Path | None = None
    stands_still = False

    def reset(self, directory: str, stands_still: bool = False, **_: Any) -> None:
        self.directory, self.stands_still = Path(directory), stands_still
        self.itself = self  # only the garbage collector frees it
        (self.directory / "pid").write_text(str(os.getpid()))
        weakref.finalize(self, (self.directory / "finalize").touch)
        atexit.register((self.directory / "atexit").touch)

    def __del__(self) -> None:
        if self.directory is not None:
            (self.directory / "del").touch()
        while self.stands_still:
            time.sleep(0.05)


class WithoutReset:
    def act(self) -> str:
        """Act."""
        return ""


class WithoutDocstring(Quiet):
    def act(self) -> str:
        return ""


class NeedsArguments(Quiet):
    def __init__(self, size: int) -> None:
        self.size = size


class FailsToReset:
    def reset(self, **_: Any) -> str:
        raise ValueError(f"no such level {'x' * 10_000}")


SHELL = Popen
