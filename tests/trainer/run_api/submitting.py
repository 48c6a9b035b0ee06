"""Submits runs for the tests of this folder."""

from typing import Any

import httpx


async def submit(client: httpx.AsyncClient, run: dict[str, Any], name: str | None = None) -> str:
    """Submit a run, and return its id."""
    reply = await client.post("/v1/runs", json=run | {"name": name})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["run"]["run_id"])
