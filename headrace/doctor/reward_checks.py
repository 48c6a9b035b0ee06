"""Checks the reward endpoints of a rewarder: whether the circuit breaker of any of them is open.

Each rewarder has its own breakers, so every rewarder is asked.
"""

import asyncio
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import quote

from headrace.asking import Asker
from headrace.doctor.findings import Finding, note, ok, problem

_MAX_ENDPOINTS = 50


async def look_at_endpoints(name: str, url: str, asker: Asker, *, key: str) -> list[Finding]:
    """Return findings on the reward endpoints and functions of one rewarder; empty if it does not list them."""
    listed = await asker.get_all(f"{url}/v1/rewards", "reward_funcs", key=key)
    if listed.status != HTTPStatus.OK or not isinstance(listed.get("reward_funcs"), list):
        return []  # reported by the checks of the service itself
    functions = listed.objects("reward_funcs")
    endpoints = [str(one.get("name")) for one in functions if one.get("kind") == "endpoint"]
    findings = [
        note(name, "reward functions", f"{one.get('name')}: {one.get('warning')}")
        for one in functions
        if one.get("warning")
    ]
    answers = await asyncio.gather(
        *(asker.get(f"{url}/v1/rewards/{quote(one, safe='')}", key=key) for one in endpoints[:_MAX_ENDPOINTS])
    )
    states = {
        endpoint: cast("dict[str, Any]", answer.get("state"))
        for endpoint, answer in zip(endpoints, answers, strict=False)
        if isinstance(answer.get("state"), dict)
    }
    left_alone = {endpoint: state for endpoint, state in states.items() if state.get("breaker") != "closed"}
    findings += [
        problem(
            name,
            "reward endpoints",
            f"{endpoint} is left alone for now: {state.get('detail') or state.get('breaker')}",
            f"check whether the endpoint is up; POST /v1/rewards/{endpoint}/test calls it once and shows its answer",
        )
        for endpoint, state in left_alone.items()
    ]
    if states and not left_alone:
        findings.append(ok(name, "reward endpoints", f"{len(states)} registered, none is failing"))
    return findings
