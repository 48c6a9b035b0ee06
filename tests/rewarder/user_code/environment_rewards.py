"""Reward functions that read the environments of the rollouts. ``of_trl`` is the one of TRL's documentation."""

import asyncio
import copy
from typing import Any


def of_trl(environments, **kwargs) -> list[float]:  # type: ignore[no-untyped-def]  # pyright: ignore
    return [env.reward for env in environments]  # pyright: ignore


async def of_trl_later(environments: list[Any], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [env.reward for env in environments]


def only_wordle(environments: list[Any], **_: Any) -> list[float | None]:
    return [env.reward if env.active == "wordle" else None for env in environments]


def spoils(environments: list[Any], **_: Any) -> list[float]:
    for env in environments:
        env.board.append(1)
        env.reward = 100.0
    return [float(len(copy.deepcopy(env).board)) for env in environments]


def asks_for_a_client(environments: list[Any], **_: Any) -> list[float]:
    return [env.client.score() for env in environments]


def calls_a_method(environments: list[Any], **_: Any) -> list[float]:
    return [env.get_reward() for env in environments]


def takes_none_if_missing(environments: list[Any], **_: Any) -> list[float | None]:
    return [getattr(env, "bonus", None) for env in environments]


def wants_no_environment(completions: list[Any]) -> list[float]:
    return [0.0 for _ in completions]
