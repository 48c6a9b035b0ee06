"""A push may be due without new weights."""

from typing import Any

import pytest

from services.trainer.push.membership import Retries, lacks, retry_after_s
from shared.control import ReplicaInfo

pytestmark = pytest.mark.unit


def info(**changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "replica_id": "generator-1",
        "run_id": "run",
        "model": "tiny",
        "transports": ["gloo"],
        "torch_version": "2.13.0",
        "nccl_version": None,
        "num_workers": 1,
        "dtype": "float32",
        "epoch": 7,
        "policy_version": 3,
        "is_held": False,
        "engine_id": "first",
    }
    return ReplicaInfo.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"policy_version": 2}, True),
        ({"epoch": 6}, True),
        ({"epoch": 0, "policy_version": -1}, True),
        ({"is_held": True}, True),
        ({"is_held": True, "is_asleep": True}, False),
        ({"is_held": True, "is_asleep": True, "policy_version": 2}, True),
        ({"is_held": True, "is_asleep": True, "epoch": 6}, True),
    ],
)
def test_a_replica_lacks_the_last_push_if_its_version_or_epoch_differs(changes: dict[str, Any], expected: bool) -> None:
    assert lacks(info(**changes), communicator_epoch=7, policy_version=3) is expected


@pytest.mark.parametrize(
    ("num_failures", "seconds"), [(1, 5), (2, 10), (3, 20), (4, 40), (6, 160), (7, 300), (100, 300), (5000, 300)]
)
def test_the_wait_doubles_up_to_five_minutes(num_failures: int, seconds: float) -> None:
    assert retry_after_s(num_failures) == seconds


def test_one_that_fails_again_and_again_is_tried_less_and_less_often() -> None:
    retries, lacking = Retries(), info(policy_version=-1, epoch=0)
    now, tried_at = 0.0, list[float]()
    while now < 400.0:
        if retries.needs_push(
            [info(replica_id="generator-2"), lacking], communicator_epoch=7, policy_version=3, now=now
        ):
            tried_at.append(now)
            retries.failed(lacking, is_to_blame=True, now=now)
        now += 1.0
    assert tried_at == [0.0, 5.0, 15.0, 35.0, 75.0, 155.0, 315.0]


@pytest.mark.parametrize("is_forgiven_by", ["success", "another engine"])
def test_failures_are_forgotten(is_forgiven_by: str) -> None:
    retries, lacking = Retries(), info(policy_version=2)
    for _ in range(4):
        retries.failed(lacking, is_to_blame=True, now=100.0)
    assert not retries.is_due(lacking, now=139.0)
    if is_forgiven_by == "success":
        retries.succeeded("generator-1")
    else:
        lacking = info(policy_version=2, engine_id="second")
    assert retries.is_due(lacking, now=100.0)
    retries.failed(lacking, is_to_blame=True, now=200.0)
    assert not retries.is_due(lacking, now=204.0)
    assert retries.is_due(lacking, now=205.0)


def test_failures_for_which_it_was_not_to_blame_do_not_lengthen_the_wait() -> None:
    retries, lacking = Retries(), info(policy_version=2)
    for _ in range(4):
        retries.failed(lacking, is_to_blame=False, now=100.0)
    assert not retries.is_due(lacking, now=104.0)
    assert retries.is_due(lacking, now=105.0)
