"""What happens to a model's process, and what that costs which calls: hangs, deaths, the end of the rewarder."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_models import RewardModels
from services.rewarder.reward_models.served_model import ServedModel
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.worker_frames import Answer
from services.rewarder.worker_pool import RewardFailure
from tests.rewarder.conftest import ROOT, descendants, is_running, until, wait_for
from tests.rewarder.reward_models.conftest import call_for, count, serving

# One pass of 600 x 200 tokens takes long enough to be met in it.
LARGE = [("a" * 199, "b")] * 300
SETTINGS = ModelSettings(device="cpu", max_batch_tokens=200_000, min_hang_s=5.0)

ALONE = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.reward_models import RewardModels

async def main():
    metrics = RewardModelMetrics(CollectorRegistry())
    models = RewardModels(ModelSettings(device="cpu"), metrics=metrics, in_use=tuple)
    answer, _ = await models.call(sys.argv[1], RewardCall(["a"], ["b"], {}), timeout_s=60, lane="x")
    print(answer.verdicts[0].outcome, sorted({"torch", "transformers"} & set(sys.modules)), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def served(models: RewardModels, name: str) -> ServedModel | None:
    return models._models.get(name)  # pyright: ignore[reportPrivateUsage]


async def in_a_pass(models: RewardModels, name: str, *, num_calls: int) -> int:
    """Wait until that many calls are being scored; return the process's id."""

    async def is_scoring() -> bool:
        model = served(models, name)
        calls = {} if model is None else model._calls  # pyright: ignore[reportPrivateUsage]
        return sum(call.begun.done() for call in calls.values()) == num_calls

    await until(is_scoring, what="the pass", timeout_s=100.0)
    model = served(models, name)
    assert model is not None
    assert model.pid is not None
    return model.pid


async def outcome_of(work: "asyncio.Task[tuple[Answer, float]]") -> tuple[str, str]:
    """Return outcome and detail of a call that fails."""
    with pytest.raises(RewardFailure) as caught:
        await work
    return caught.value.outcome, caught.value.detail


def start_call(
    models: RewardModels, name: str, *pairs: tuple[str, str], timeout_s: float
) -> "asyncio.Task[tuple[Answer, float]]":
    """Begin a call."""

    async def call() -> tuple[Answer, float]:
        return await models.call(name, call_for(*pairs), timeout_s=timeout_s, lane="a")

    return asyncio.create_task(call())


@pytest.mark.slow
async def test_a_deadline_is_of_one_call_and_a_hang_costs_the_calls_in_it_and_a_process(
    reward_model: Path, metrics: RewarderMetrics
) -> None:
    name = str(reward_model)
    async with serving(SETTINGS, metrics=metrics) as models:
        # Three calls in one pass: one has little time, the others have more.
        hasty = start_call(models, name, *LARGE[:100], timeout_s=5.0)
        others = [start_call(models, name, *LARGE[:100], timeout_s=60.0) for _ in range(2)]
        pid = await in_a_pass(models, name, num_calls=3)
        os.kill(pid, signal.SIGSTOP)
        assert await outcome_of(hasty) == ("timeout", "took longer than 5 s")
        os.kill(pid, signal.SIGCONT)
        for answer, _ in await asyncio.gather(*others):
            assert [verdict.outcome for verdict in answer.verdicts] == ["scored"] * 100
        assert count(metrics, "batch_texts_count", model=name) == 1, "they were not in one pass"

        hung = [start_call(models, name, *LARGE, timeout_s=timeout_s) for timeout_s in (5.0, 6.0)]
        assert await in_a_pass(models, name, num_calls=2) == pid
        os.kill(pid, signal.SIGSTOP)
        queued = start_call(models, name, ("a", "b"), timeout_s=60.0)
        assert [(await outcome_of(call))[0] for call in hung] == ["timeout", "timeout"]
        answer, _ = await queued
        assert answer.verdicts[0].outcome == "scored"
        assert not is_running(pid)
        assert count(metrics, "kills_total", reason="timeout") == 1


@pytest.mark.slow
async def test_a_process_that_dies_costs_what_it_was_at_and_nothing_else(
    reward_model: Path, metrics: RewarderMetrics
) -> None:
    name = str(reward_model)
    async with serving(SETTINGS, metrics=metrics) as models:
        await models.call(name, call_for(("a", "b")), timeout_s=60.0, lane="a")
        struck = start_call(models, name, *LARGE, timeout_s=60.0)
        pid = await in_a_pass(models, name, num_calls=1)
        os.kill(pid, signal.SIGSTOP)
        queued = start_call(models, name, ("a", "b"), timeout_s=60.0)
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await outcome_of(struck) == ("error", "the model's process died with signal 9 while it scored this")
        answer, _ = await queued
        assert answer.verdicts[0].outcome == "scored"
        assert not is_running(pid)


@pytest.mark.slow
async def test_a_chat_template_without_end_is_a_timeout_of_its_call_and_who_waits_is_scored_by_another_process(
    reward_model: Path, metrics: RewarderMetrics
) -> None:
    name = str(reward_model)
    endless = RewardCall(
        prompts=[[{"role": "user", "content": "a"}]],
        completions=[[{"role": "assistant", "content": "b"}]],
        columns={},
        chat_template_kwargs={"spin": True},
    )
    async with serving(SETTINGS, metrics=metrics) as models:
        hung = asyncio.create_task(models.call(name, endless, timeout_s=0.5, lane="a"))
        await asyncio.sleep(0)
        queued = start_call(models, name, ("a", "b"), timeout_s=60.0)
        assert await outcome_of(hung) == ("timeout", "took longer than 5 s, and the model's process was killed")
        answer, _ = await queued
        assert answer.verdicts[0].outcome == "scored"
        assert count(metrics, "kills_total", reason="timeout") == 1


def test_torch_is_not_imported_where_the_rewarder_runs_and_a_model_ends_with_its_rewarder(reward_model: Path) -> None:
    rewarder = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(reward_model)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with rewarder:
        assert rewarder.stdout is not None
        try:
            assert rewarder.stdout.readline() == "scored []\n"
            below = descendants(rewarder.pid)
            assert len(below) == 1
            # It cannot notice by reading that the rewarder is gone: the kernel ends it.
            for pid in below:
                os.kill(pid, signal.SIGSTOP)
        finally:
            rewarder.kill()
        wait_for(lambda: not any(is_running(pid) for pid in below), what="the end of the model's process")
