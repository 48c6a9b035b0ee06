"""kill -9 during a push, or SIGSTOP for longer than a lease: no group is lost or trained twice."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest

from headrace.local.process_table import descendants
from shared.control import WEIGHTS_PATH, ReplicaInfo
from shared.redis.lease import LEASE_S
from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def info_of_generator(stack: Stack) -> ReplicaInfo:
    endpoint = stack.state.endpoint()
    assert endpoint is not None
    headers = {"authorization": f"Bearer {stack.state.keys().internal_key}"}
    url = f"{endpoint.generator_urls[0]}{WEIGHTS_PATH}"
    response = httpx.get(url, headers=headers, timeout=120, trust_env=False)
    return ReplicaInfo.model_validate_json(response.raise_for_status().content)


def is_receiving(info: ReplicaInfo) -> bool:
    """Whether the generator is between begin and commit of a push, so that its staged weights are incomplete."""
    return info.policy_version >= 0 and info.epoch > 0 and info.staged_checksum is None


def stop_rank_in_a_push(stack: Stack) -> int:
    """Stop the training rank when the generator has begun to receive; return the rank's pid."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if is_receiving(info_of_generator(stack)):
            rank = stack.rank_pid()
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.5)  # requests that it has already sent still take effect
            if is_receiving(info_of_generator(stack)):
                return rank
            os.kill(rank, signal.SIGCONT)
        time.sleep(0.002)
    raise AssertionError("no push was caught in the middle")


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.parametrize("victim", ["generator-0", "rank"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_run_survives_in_the_middle_of_a_push_the(
    fault: Literal["kill", "stop"], victim: str, stack: Stack, run_file: Callable[..., dict[str, Any]]
) -> None:
    run_id = stack.client.submit(run_file(max_steps=20, push_timeout_s=8.0)).run_id
    stack.wait_for_step(run_id, 4)
    generator = stack.service_pid("generator-0")
    everything_of_generator = [generator, *(process.pid for process in descendants(generator))]
    rank = stop_rank_in_a_push(stack)
    if fault == "kill":
        os.kill(generator if victim == "generator-0" else rank, signal.SIGKILL)
        if victim == "generator-0":
            os.kill(rank, signal.SIGCONT)
    else:
        if victim == "generator-0":
            signal_all(everything_of_generator, signal.SIGSTOP)
            os.kill(rank, signal.SIGCONT)
        time.sleep(LEASE_S + 3)
        signal_all([rank] if victim == "rank" else everything_of_generator, signal.SIGCONT)

    run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run["reason"]
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert max(line["staleness/max"] for line in stack.client.metrics(run_id)) <= 1
    if victim == "generator-0":
        assert run["progress"]["pushes_confirmed"] < run["progress"]["pushes"], "it was not in the middle of a push"
