"""Reward functions that send forged messages to the service instead of their worker."""

import gc
import socket
from typing import Any

import msgspec


def _say(body: bytes) -> None:
    for channel in [each for each in gc.get_objects() if isinstance(each, socket.socket) and each.fileno() >= 0]:
        channel.sendall(len(body).to_bytes(4, "big") + body)


def _answer(*verdicts: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"type": "Answer", "verdicts": verdicts})


def no_text(prompts: Any, completions: list[Any], **_: Any) -> list[float]:
    _say(b"\x82\xa4type\xa6Answer\xa8verdicts\x91\x82\xa7outcome\xa6scored\xa6detail\xa1\xff")
    return [1.0] * len(completions)


def nested_without_end(prompts: Any, completions: list[Any], **_: Any) -> list[float]:
    _say(b"\x91" * 100_000)
    return [1.0] * len(completions)


def too_few(prompts: Any, completions: list[Any], **_: Any) -> list[float]:
    _say(_answer({"outcome": "scored", "value": 1.0}))
    return [1.0] * len(completions)


def without_a_value(prompts: Any, completions: list[Any], **_: Any) -> list[float]:
    _say(_answer(*[{"outcome": "scored"} for _ in completions]))
    return [1.0] * len(completions)


def no_number(prompts: Any, completions: list[Any], **_: Any) -> list[float]:
    _say(_answer(*[{"outcome": "scored", "value": float("nan")} for _ in completions]))
    return [1.0] * len(completions)
