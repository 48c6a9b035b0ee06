"""A generator that the others cannot reach keeps all of them waiting, and no answer shows which one it is."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.trainer.fence import take_over
from services.trainer.push.blame import AttemptError
from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet
from shared.control import CommitReply, Transport
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.trainer.push.test_membership import info
from tests.weights.replica import RUN_ID
from tests.weights.senders import make_sender


class Replicas:
    """The live replicas, as the test sets them."""

    def __init__(self, transport: Transport) -> None:
        self.names: list[str] = []
        self._transport: Transport = transport

    async def reconcile(self, *, without: Collection[str] = ()) -> Fleet:
        ready: Any = {name: SimpleNamespace(info=info(replica_id=name)) for name in self.names if name not in without}
        return Fleet(ready, {}, self._transport, "a test")

    async def listed(self) -> set[str]:
        return set(self.names)

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("transport", "in_rendezvous"), [("gloo", True), ("gloo", False), ("disk", True)])
async def test_if_nobody_is_to_blame_for_a_failed_rendezvous_newcomers_are_left_out_of_the_second_attempt(
    redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch, transport: Transport, in_rendezvous: bool
) -> None:
    assert run_keys.run_id == RUN_ID
    sender, replicas = make_sender(redis, await take_over(redis, run_keys)), Replicas(transport)
    tried: list[set[str]] = []

    async def attempt(result: PushResult, *_: object, **__: object) -> None:
        tried.append(set(result.fleet.ready))
        if "unreachable" in result.fleet.ready:
            raise AttemptError("join: no answer by the deadline", blamed={}, in_rendezvous=in_rendezvous)
        reply = cast("CommitReply", SimpleNamespace(probe_failure=None))
        result.replies = {name: reply for name in result.fleet.ready}  # noqa: C420  dict.fromkeys has a wider type

    async def abort(*_: object, **__: object) -> list[Any]:
        return []

    monkeypatch.setattr(sender, "_replicas", replicas)
    monkeypatch.setattr(sender, "_attempt", attempt)
    monkeypatch.setattr(vars(sender)["_epochs"], "abort", abort)
    weights = {"w": torch.zeros(2)}
    try:
        replicas.names = ["unreachable"]
        first = await sender.push(lambda: weights.items(), policy_version=0)
        assert (first.members, tried) == ((), [{"unreachable"}] * 2)
        replicas.names = ["a", "b"]
        assert set((await sender.push(lambda: weights.items(), policy_version=1)).members) == {"a", "b"}
        replicas.names = ["a", "b", "unreachable"]
        last = await sender.push(lambda: weights.items(), policy_version=2)
        if not in_rendezvous or transport == "disk":
            assert tried[-2:] == [{"a", "b", "unreachable"}] * 2, "newcomers have no part in it"
            return
        assert tried[-2:] == [{"a", "b", "unreachable"}, {"a", "b"}]
        assert set(last.members) == {"a", "b"}
        assert (set(last.failed), last.blamed) == ({"unreachable"}, {"unreachable"})
    finally:
        await sender.close()
