"""The records of each push: a line in the run's directory, counts that outlive the trainer, and "confirmed" pushes."""

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.trainer.loop import push_schedule
from services.trainer.loop.push_schedule import PushSchedule
from services.trainer.push.prober import Prober
from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet, Member, Replica
from services.trainer.telemetry.run_log import RunLog
from shared.control import CommitReply
from shared.errors import PushError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Waiting
from tests.trainer.push.test_blame import INFO

CLIENT = httpx.AsyncClient()
OFF = "off by 7 nats"
PROBER = Prober(lambda _: [-1.0], token_ids=[5, 6], tolerance=0.5)


def reply(replica_id: str, probe_failure: str | None = None) -> CommitReply:
    return CommitReply(
        replica_id=replica_id,
        policy_version=3,
        receive_s=0.5,
        load_s=0.25,
        standstill_s=0.375,
        probe_s=0.125,
        probe_max_diff=7.0 if probe_failure else 0.001,
        probe_failure=probe_failure,
    )


def result(failed: dict[str, str], *replies: CommitReply, had_before: tuple[str, ...] = ()) -> PushResult:
    confirmed = {answer.replica_id: answer for answer in replies}
    stayed = [name for name in (*confirmed, *had_before, *failed) if not name.startswith("gone")]
    ready = {name: Member(Replica(name, "http://nowhere", CLIENT), INFO) for name in stayed}
    return PushResult(
        policy_version=3,
        fleet=Fleet(ready=ready, refused={}, transport="gloo", why_transport="there is no GPU"),
        communicator_epoch=1,
        failed=failed,
        had_before=list(had_before),
        replies=confirmed,
        total_s=1.5,
        num_bytes=68,
    )


@pytest.mark.parametrize(
    ("outcome", "is_confirmed"),
    [
        (result({}, reply("a"), reply("b")), True),
        (result({"b": "commit: out of memory"}, reply("a")), False),
        (result({"b": "after the push ..."}, reply("a"), reply("b", "off by 7 nats")), False),
        (result({"gone": "cannot be reached"}, reply("a")), True),
        (result({"gone": "cannot be reached"}), False),
        (result({}, had_before=("a",)), True),
        (result({"b": "no port is left"}, had_before=("a",)), False),
        (result({}), False),
    ],
)
def test_a_push_is_confirmed_if_every_member_of_its_last_attempt_has_the_version(
    outcome: PushResult, is_confirmed: bool
) -> None:
    assert outcome.is_confirmed is is_confirmed


class ScriptedSender:
    """Returns these results, one per push."""

    def __init__(self, *results: PushResult, needs_push: bool = False) -> None:
        self._results = list(results)
        self._needs_push = needs_push
        self.num_asked = 0

    async def needs_push(self) -> bool:
        self.num_asked += 1
        return self._needs_push

    async def push(
        self, weights: Callable[[], Iterable[Any]], *, policy_version: int, prober: Prober | None = None
    ) -> PushResult:
        return self._results.pop(0)

    async def require_pushed(self) -> None:
        return

    async def let_sleep(self) -> None:
        return


async def test_every_push_is_a_line_and_counts_go_on_where_the_trainer_before_ended(
    redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    run_log = RunLog(redis, keys=run_keys, run_dir=tmp_path)
    outcomes = (result({"b": "the probe"}, reply("a"), reply("b", "off by 7 nats")), result({}, reply("a"), reply("b")))
    pushes = PushSchedule(
        ScriptedSender(*outcomes),
        run_log=run_log,
        prober=PROBER,
        num_pushes=10,
        num_confirmed=9,
        num_probes_failed=2,
    )
    assert pushes.metrics() == {"push/count": 10.0, "push/confirmed": 9.0, "push/probe_failed": 2.0}
    await pushes.push_if_needed(list, policy_version=0)
    assert (pushes.num_left_out, pushes.left_out()) == (1, {"b": "the probe"})
    await pushes.push_if_needed(list, policy_version=1)
    assert (pushes.num_left_out, pushes.left_out()) == (0, {})
    counts = {"push/count": 12.0, "push/confirmed": 10.0, "push/probe_failed": 3.0}
    assert pushes.metrics().items() >= counts.items()
    assert (pushes.num_pushes, pushes.num_confirmed, pushes.num_probes_failed) == (12, 10, 3)

    run_log.cut_back_to(0)
    first, second = [json.loads(line) for line in (tmp_path / "pushes.jsonl").read_text().splitlines()]
    assert first.pop("at_s") <= second["at_s"]
    assert first == {
        "policy_version": 0,
        "epoch": 1,
        "transport": "gloo",
        "members": ["a"],
        "failed": {"b": "the probe"},
        "total_s": 1.5,
        "standstill_s": 0.375,
        "receive_s": 0.5,
        "load_s": 0.25,
        "probe_s": 0.125,
        "probe_max_diff": 7.0,
        "num_probes_failed": 1,
        "num_bytes": 68,
        "is_confirmed": False,
    }
    assert (second["failed"], second["is_confirmed"]) == ({}, True)


async def test_some_of_many_replicas_left_out_are_reported_with_short_reasons(
    redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    failed = {f"gone-{number:02d}": 2000 * "x" for number in range(20)}
    run_log = RunLog(redis, keys=run_keys, run_dir=tmp_path)
    pushes = PushSchedule(ScriptedSender(result(failed, reply("a"))), run_log=run_log)
    await pushes.push_if_needed(list, policy_version=0)
    told = pushes.left_out()
    assert (pushes.num_left_out, pushes.num_confirmed) == (20, 1)
    assert list(told) == [f"gone-{number:02d}" for number in range(8)]
    assert max(map(len, told.values())) == 500


@pytest.mark.parametrize(("asking_s", "at_least", "at_most"), [(0.0, 4, 1000), (0.1, 1, 3)])
async def test_a_fleet_that_takes_long_to_ask_is_asked_less_often(
    asking_s: float,
    at_least: int,
    at_most: int,
    redis: Redis,
    run_keys: RunKeys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Any = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(push_schedule, "time", clock)

    class SlowFleet(ScriptedSender):
        async def needs_push(self) -> bool:
            clock.now_s += asking_s
            return await super().needs_push()

    sender = SlowFleet(result({}, reply("a")))
    pushes = PushSchedule(sender, run_log=RunLog(redis, keys=run_keys, run_dir=tmp_path))
    for _ in range(100):  # two seconds, without those of the questions
        await pushes.push_if_needed(list, policy_version=0)
        clock.now_s += 0.02
    assert at_least <= sender.num_asked <= at_most


async def test_a_run_whose_push_reached_no_replica_reports_it_in_a_form_that_the_run_api_knows(
    redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    run_log = RunLog(redis, keys=run_keys, run_dir=tmp_path)
    pushes = PushSchedule(ScriptedSender(result({"b": "commit: out of memory"})), run_log=run_log)
    await pushes.push_if_needed(list, policy_version=3)
    assert pushes.waiting() == Waiting("push_failed", "a generator: the push to b failed (commit: out of memory)")


@pytest.mark.parametrize(
    ("outcomes", "ends"),
    [
        ([result({"a": OFF}, reply("a", OFF))] * 4, True),
        ([result({"a": OFF}, reply("a", OFF))] * 3 + [result({}, reply("a"))] * 2, False),
        ([result({"a": OFF}, reply("a", OFF), reply("b"))] * 6, False),
        ([result({"a": "no port is left"})] * 6, False),
    ],
)
async def test_a_version_whose_probe_no_replica_ever_passes_ends_the_run(
    redis: Redis,
    run_keys: RunKeys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[PushResult],
    ends: bool,
) -> None:
    monkeypatch.setattr(push_schedule, "_RETRY_AFTER_S", 0.0)
    sender = ScriptedSender(*outcomes, needs_push=True)
    pushes = PushSchedule(sender, run_log=RunLog(redis, keys=run_keys, run_dir=tmp_path), prober=PROBER)
    with pytest.raises(PushError, match="off by 7 nats") if ends else contextlib.nullcontext():
        for _ in outcomes:
            await pushes.push_if_needed(list, policy_version=3)
    assert pushes.num_pushes == len(outcomes)


async def test_probes_of_several_versions_that_fail_do_not_end_the_run(
    redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    refused = [result({"a": OFF}, reply("a", OFF))] * 8
    pushes = PushSchedule(
        ScriptedSender(*refused), run_log=RunLog(redis, keys=run_keys, run_dir=tmp_path), prober=PROBER
    )
    for policy_version in range(8):
        await pushes.push_if_needed(list, policy_version=policy_version)
    assert pushes.num_probes_failed == 8
