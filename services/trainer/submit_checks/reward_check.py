"""Asks the rewarder whether it knows a run's reward functions, so that a wrong name fails at submit, not in a run.

POST {rewarder_url}/v1/rewards/check   {"reward_funcs": [...], "reward_kwargs": {...}}
                                       -> 200 with the columns they need, or 422
"""

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from services.trainer.problems import Problem
from shared.run_options.run_config import RunConfig
from shared.service.tls import PUBLIC_TLS, PeerTls, trouble_with

_MAX_ANSWER_BYTES = 1024 * 1024


@dataclass(frozen=True)
class RewardNeeds:
    """The columns that one reward function needs: one column of each inner list."""

    name: str
    columns: list[list[str]]

    def missing(self, columns: Collection[str]) -> list[str]:
        """Return the missing columns, as words: alternatives are joined with "or"."""
        return [" or ".join(choice) for choice in self.columns if choice and not set(choice) & set(columns)]


async def check_rewards(
    config: RunConfig, *, rewarder_url: str, api_key: str, timeout_s: float, tls: PeerTls = PUBLIC_TLS
) -> list[RewardNeeds]:
    """Return what each reward function needs.

    Raises:
        Problem: 422 with the rewarder's own sentence, or 503 if the rewarder cannot be used.
    """
    if not config.reward_funcs:  # the environment's reward is enough
        return []
    url = f"{rewarder_url.rstrip('/')}/v1/rewards/check"
    # Left out if empty: an older rewarder refuses an unknown key.
    kwargs = {"reward_kwargs": config.reward_kwargs} if config.reward_kwargs else {}
    body = {"reward_funcs": config.reward_funcs} | kwargs
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=timeout_s, **tls.for_async_client()) as client,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            content = await _read_bounded(response)
    except (httpx.HTTPError, TimeoutError) as error:
        why = trouble_with(error, host=urlsplit(url).hostname or "")
        raise _unusable(url, why or f"it did not answer ({type(error).__name__})") from error
    answer = _as_object(content)
    if response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY and answer is not None:
        detail = str(answer.get("detail", "the rewarder refuses these reward functions"))[:2000]
        errors = [("reward_funcs", message) for message in _messages(answer)] or [("reward_funcs", detail)]
        raise Problem(422, "Invalid run", f"reward_funcs: {detail}", errors=errors)
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        why = "it refuses the key" if api_key else "it requires a key, but this trainer was started without one"
        raise _unusable(url, f"{why}; start both services with the same HEADRACE_API_KEY")
    if response.status_code == HTTPStatus.FORBIDDEN and answer is not None:
        raise _unusable(url, f"it refuses the key that HEADRACE_API_KEY gives this trainer: {answer.get('detail')}")
    if response.status_code != HTTPStatus.OK or answer is None:
        raise _unusable(url, f"it answered {response.status_code}")
    return _needs(answer)


def _needs(answer: dict[str, Any]) -> list[RewardNeeds]:
    try:
        return [RewardNeeds(str(item["name"]), list(item["required_columns"])) for item in answer["reward_funcs"]]
    except (KeyError, TypeError):
        return []  # a rewarder that does not report them


async def _read_bounded(response: httpx.Response) -> bytes:
    content = b""
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            return b""
    return content


def _as_object(content: bytes) -> dict[str, Any] | None:
    try:
        answer: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else None


def _messages(answer: dict[str, Any]) -> list[str]:
    errors: Any = answer.get("errors")
    if not isinstance(errors, list):
        return []
    found = cast("Sequence[Any]", errors)[:100]
    items = [cast("dict[str, Any]", item) for item in found if isinstance(item, dict)]
    return [str(item.get("message", ""))[:1000] for item in items]


def _unusable(url: str, why: str) -> Problem:
    return Problem(
        503,
        "Rewarder unavailable",
        f"The reward functions could not be checked: the rewarder at {url} cannot be used: {why}. "
        "Start it, or set HEADRACE_REWARDER_URL to the address of a running rewarder, and submit again.",
        headers={"Retry-After": "5"},
    )
