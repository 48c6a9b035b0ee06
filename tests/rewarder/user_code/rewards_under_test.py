"""Reward functions as users write them, good and bad. Nothing here imports headrace."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_meetings: dict[str, asyncio.Barrier] = {}
lowered = str.lower  # a method descriptor, which has no __module__


def one(completions: list[str], **_: Any) -> list[float]:
    """1.0 for every completion."""
    return [1.0] * len(completions)


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def without_kwargs(completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


async def step_as_reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def everything(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any) -> list[float]:
    columns["log_extra"]("seen", completions)
    columns["log_metric"]("seen", 1.0)
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["answer"])
    assert (trainer_state.global_step, trainer_state.max_steps) == (3, 9)
    return [float(len(ids)) for ids in completion_ids]


def roles(prompts: Any, completions: Any, **_: Any) -> list[float]:
    good = prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [float(good and completion[0]["content"] == "42") for completion in completions]


def raises(**_: Any) -> list[float]:
    raise ValueError("the judge is \ud800 ill")


async def raises_async(**_: Any) -> list[float]:
    raise ValueError("the judge is \ud800 ill")


def exits(**_: Any) -> list[float]:
    raise SystemExit(3)


async def exits_async(**_: Any) -> list[float]:
    raise SystemExit(3)


async def cancels_itself(**_: Any) -> list[float]:
    raise asyncio.CancelledError


def crashes(**_: Any) -> list[float]:
    os._exit(7)


def starts_a_child_and_exits(pid_file: list[str], **_: Any) -> list[float]:
    Path(pid_file[0]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    os._exit(7)


def speaks_for_the_worker(**_: Any) -> list[float]:
    """Write a frame that is not a reply to the socket between service and worker."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                connection.sendall(b"\0\0\0\1\xc1")
    while True:
        time.sleep(0.05)


_processor_seconds = signal.getitimer(signal.ITIMER_VIRTUAL)[0]


def processor_seconds_of_its_import(completions: list[str], **_: Any) -> list[float]:
    return [_processor_seconds] * len(completions)


def processor_seconds_of_a_child(completions: list[str], **_: Any) -> list[float]:
    code = (
        "import resource, signal; "
        "print(*resource.getrlimit(resource.RLIMIT_CPU), *signal.getitimer(signal.ITIMER_VIRTUAL))"
    )
    limits = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return [max(float(limit) for limit in limits)] * len(completions)


def hangs(pid_file: list[str] | None = None, **_: Any) -> list[float]:
    if pid_file:
        child = subprocess.Popen(["sleep", "600"])
        Path(pid_file[0]).write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(0.05)


async def hangs_async(**_: Any) -> list[float]:
    for _attempt in range(3):  # a user's function may suppress its cancellation
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    return []


async def beside_a_thread(completions: list[str], **_: Any) -> list[float]:
    """The thread never ends."""
    threading.Thread(target=threading.Event().wait).start()
    return [1.0 for _ in completions]


async def never_ends(**_: Any) -> list[float]:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


def one_too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def nonsense(completions: list[str], **_: Any) -> list[Any]:
    return [float("nan"), float("inf"), "0.5", None, True, 2][: len(completions)]


async def begins_and_ends(completions: list[str], directory: list[str], **_: Any) -> list[float]:
    for word in ("begin", "end"):
        with (Path(directory[0]) / "calls").open("a", encoding="ascii") as calls:
            calls.write(f"{word}\n")
        await asyncio.sleep(0.1)
    return [1.0] * len(completions)


async def half_a_second(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0.5)
    return [1.0] * len(completions)


async def meets_another(completions: list[str], meeting: list[str], **_: Any) -> list[float]:
    await _meetings.setdefault(meeting[0], asyncio.Barrier(2)).wait()
    return [1.0] * len(completions)


async def meets_one(completions: list[str], meeting: list[str], **_: Any) -> list[float]:
    await _meetings.setdefault(meeting[0], asyncio.Barrier(2)).wait()
    return [2.0] * len(completions)


def _meet(directory: str, mine: str, other: str) -> None:
    (Path(directory) / mine).touch()
    while not (Path(directory) / other).exists():
        time.sleep(0.005)


def meets_left(completions: list[str], directory: list[str], **_: Any) -> list[float]:
    _meet(directory[0], "left", "right")
    return [1.0] * len(completions)


def meets_right(completions: list[str], directory: list[str], **_: Any) -> list[float]:
    _meet(directory[0], "right", "left")
    return [2.0] * len(completions)


def waits_for_go(completions: list[str], directory: list[str], **_: Any) -> list[float]:
    place = Path(directory[0])
    (place / f"started-{os.getpid()}").touch()
    while not (place / "go").exists():
        time.sleep(0.005)
    return [1.0] * len(completions)


async def blocks_the_loop(completions: list[str], directory: list[str], **_: Any) -> list[float]:
    return waits_for_go(completions, directory)


NOT_A_FUNCTION = 3


def scaled(completions: list[str], factor: float) -> list[float]:
    return [factor * len(completion) for completion in completions]


async def scaled_async(completions: list[str], factor: float) -> list[float]:
    return scaled(completions, factor)


def cannot_parse(completions: list[str], **_: Any) -> list[float]:
    raise ValueError(f"cannot parse {completions[0]}, which ends here")


async def cannot_parse_async(completions: list[str], **_: Any) -> list[float]:
    raise ValueError(f"cannot parse {completions[0]}, which ends here")
