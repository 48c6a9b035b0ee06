"""The process that starts a further machine's training ranks: it follows the run API, and needs nothing else."""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.trainer.node import NodeFollower, RunApiAwayError, node_number
from services.trainer.settings import TrainerSettings
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.headrace.scripted_api import problem, serving

ENDS_WHEN_ASKED = ("sh", "-c", 'echo "$@"; exec sleep 60', "launcher")
ENDS_AT_ONCE = ("sh", "-c", 'echo "$@"', "launcher")


class FakeRunApi:
    """A run API with one run, or none."""

    def __init__(self, tmp_path: Path, config: RunConfig) -> None:
        self.status = "running"
        self.is_away = False
        self.has_another_key = False
        self.is_deleted = False
        self.lists_on_first_page = True
        self.num_asked = 0
        self.num_lists = 0
        self.log = tmp_path / "run-a" / "node-1.log"
        self._run = {"run_id": "run-a", "run_dir": str(tmp_path / "run-a"), "config": config.model_dump(mode="json")}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url="http://trainer:8000")

    def starts(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.num_asked += 1
        if self.is_away:
            return httpx.Response(503)
        if self.has_another_key:
            return httpx.Response(401)
        is_list = request.url.path == "/v1/runs"
        self.num_lists += is_list
        run: dict[str, Any] = self._run | {"status": self.status}
        if is_list:
            fits = not self.is_deleted and self.status in request.url.params.get_list("status")
            is_first = "cursor" not in request.url.params
            if is_first and not self.lists_on_first_page:
                return httpx.Response(200, json={"runs": [], "next_cursor": "further"})
            return httpx.Response(200, json={"runs": [run] if fits else [], "next_cursor": None})
        return httpx.Response(404) if self.is_deleted else httpx.Response(200, json=run)


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(runs_dir=tmp_path, rank_command=["rank"], rendezvous_endpoint="trainer-0.nodes:29500")


@pytest.fixture
def api(tmp_path: Path, run_config: RunConfig) -> FakeRunApi:
    return FakeRunApi(tmp_path, run_config.model_copy(update={"nnodes": 2, "nproc_per_node": 8}))


@contextlib.asynccontextmanager
async def following(
    settings: TrainerSettings,
    api: FakeRunApi,
    *,
    node_rank: int = 1,
    launcher: tuple[str, ...] = ENDS_WHEN_ASKED,
    heartbeat: Path | None = None,
) -> AsyncGenerator[None]:
    stopping = asyncio.Event()
    async with api.client() as client:
        follower = NodeFollower(
            settings, client, node_rank=node_rank, launcher=launcher, heartbeat=heartbeat, poll_s=0.02, pause_s=0.1
        )
        task = asyncio.create_task(follower.follow(stopping))
        try:
            yield
        finally:
            stopping.set()
            await task


async def test_a_run_with_enough_nodes_gets_its_ranks_here(settings: TrainerSettings, api: FakeRunApi) -> None:
    async with following(settings, api):
        await eventually(api.starts)
    assert api.starts() == [
        "--nproc-per-node 8 --nnodes 2 --node-rank 1 --endpoint trainer-0.nodes:29500 run-a -- rank"
    ]


async def test_a_run_with_fewer_nodes_is_left_to_the_others(settings: TrainerSettings, api: FakeRunApi) -> None:
    async with following(settings, api, node_rank=2):
        await eventually(lambda: api.num_asked > 4)
    assert api.starts() == []


async def test_ranks_end_with_their_run_and_start_with_the_next(settings: TrainerSettings, api: FakeRunApi) -> None:
    async with following(settings, api):
        await eventually(api.starts)
        api.status = "finished"
        asked = api.num_asked
        await eventually(lambda: api.num_asked > asked + 4)
        assert len(api.starts()) == 1
        api.status = "running"
        await eventually(lambda: len(api.starts()) == 2)


async def test_while_a_run_is_served_no_list_of_all_runs_is_asked_for(
    settings: TrainerSettings, api: FakeRunApi
) -> None:
    async with following(settings, api):
        await eventually(api.starts)
        lists, asked = api.num_lists, api.num_asked
        await eventually(lambda: api.num_asked > asked + 4)
        assert api.num_lists == lists


async def test_a_run_on_a_further_page_of_the_list_is_found(settings: TrainerSettings, api: FakeRunApi) -> None:
    api.lists_on_first_page = False
    async with following(settings, api):
        await eventually(api.starts)


async def test_ranks_end_when_their_run_is_deleted(settings: TrainerSettings, api: FakeRunApi) -> None:
    async with following(settings, api):
        await eventually(api.starts)
        lists, api.is_deleted = api.num_lists, True
        # It looks for another run, so it has finished with this one.
        await eventually(lambda: api.num_lists > lists + 1)
        assert len(api.starts()) == 1


async def test_ranks_go_on_while_the_run_api_is_away(settings: TrainerSettings, api: FakeRunApi) -> None:
    async with following(settings, api):
        await eventually(api.starts)
        api.is_away = True
        asked = api.num_asked
        await eventually(lambda: api.num_asked > asked + 4)
        api.is_away = False
        asked = api.num_asked
        await eventually(lambda: api.num_asked > asked + 4)
        assert len(api.starts()) == 1


async def test_ranks_go_on_when_the_key_is_rotated_and_this_process_ends_after_them(
    settings: TrainerSettings, api: FakeRunApi, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    launcher = ("sh", "-c", f"echo; until [ -e {end} ]; do sleep 0.1; done")
    async with api.client() as client:
        follower = NodeFollower(settings, client, node_rank=1, launcher=launcher, poll_s=0.02, pause_s=0.1)
        following = asyncio.create_task(follower.follow(asyncio.Event()))
        await eventually(api.starts)
        asked, api.has_another_key = api.num_asked, True
        await eventually(lambda: api.num_asked > asked + 4)
        assert not following.done()
        end.touch()
        with pytest.raises(RunApiAwayError, match="401"):
            async with asyncio.timeout(60):
                await following


async def test_a_launcher_that_ended_is_started_again_while_its_run_goes_on(
    settings: TrainerSettings, api: FakeRunApi
) -> None:
    async with following(settings, api, launcher=ENDS_AT_ONCE):
        await eventually(lambda: len(api.starts()) > 1)


async def test_the_heartbeat_is_touched_with_and_without_a_run(
    settings: TrainerSettings, api: FakeRunApi, tmp_path: Path
) -> None:
    beat = tmp_path / "heartbeat"
    api.status = "queued"
    async with following(settings, api, heartbeat=beat):
        await eventually(beat.exists)
        api.status = "running"
        await eventually(api.starts)
        beat.unlink()
        await eventually(beat.exists)


@pytest.mark.parametrize(("name", "number"), [("2", 2), ("headrace-trainer-node-11", 11)])
def test_a_machine_has_the_number_its_name_ends_with(name: str, number: int) -> None:
    assert node_number(name) == number


@pytest.mark.parametrize("name", ["0", "headrace-trainer-0", "-1-", "node", ""])
def test_a_name_without_a_number_above_0_is_refused(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="does not end with a number above 0"):
        node_number(name)


def run_node(api_url: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.trainer.node", "--api", api_url, "--node-rank", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment |= {"HEADRACE_LOG_LEVEL": "CRITICAL", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_it_says_that_it_must_know_where_the_ranks_meet() -> None:
    done = run_node("http://trainer:8000")
    assert done.returncode == 2
    assert "HEADRACE_RENDEZVOUS_ENDPOINT is not set" in done.stderr


def test_it_ends_if_the_run_api_does_not_know_its_key(tmp_path: Path) -> None:
    with serving(lambda _: problem(401, "This service does not know the key that was sent.")) as api:
        done = run_node(
            api.url,
            HEADRACE_RUNS_DIR=str(tmp_path),
            HEADRACE_API_KEY="of-before-the-rotation-0123456789",
            HEADRACE_RENDEZVOUS_ENDPOINT="127.0.0.1:29500",
        )
    assert done.returncode == 1, done.stderr
    assert "Start this process again with the HEADRACE_API_KEY of the run API" in done.stderr
