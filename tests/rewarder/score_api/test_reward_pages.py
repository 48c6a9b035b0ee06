"""The pages of GET /v1/rewards, without processes."""

from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from services.rewarder.built_ins.built_in_rewards import BUILT_INS
from services.rewarder.score_api.bodies import RewardFunctionInfo
from services.rewarder.score_api.endpoint_routes import add_reward_routes

pytestmark = pytest.mark.unit


class NoEndpoints:
    """A registry without endpoints."""

    async def clients(self) -> list[Any]:
        return []


async def test_a_page_may_end_with_the_longest_name() -> None:
    longest = [letter + 1021 * "\U00020000" + ":f" for letter in "ab"]
    functions = [RewardFunctionInfo(name=name, kind="sync", summary="", required_columns=[]) for name in longest]
    app = FastAPI()
    add_reward_routes(app, cast("Any", NoEndpoints()), busy={}, listed=lambda: functions)
    transport = httpx.ASGITransport(app)
    seen: list[str] = []
    params: dict[str, Any] = {"limit": 1}
    async with httpx.AsyncClient(transport=transport, base_url="http://rewarder") as client:
        while params.get("cursor", "") is not None:
            page = (await client.get("/v1/rewards", params=params)).raise_for_status().json()
            seen += [item["name"] for item in page["reward_funcs"]]
            params["cursor"] = page["next_cursor"]
    assert seen == [*sorted(BUILT_INS), *longest]
