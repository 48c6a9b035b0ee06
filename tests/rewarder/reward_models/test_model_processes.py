"""Faults of a model's process, and which calls they affect: hangs, deaths, the end of the rewarder."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.rewarder.reward_answer import Answer
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.reward_models import model_process
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_models import RewardModels
from services.rewarder.rewarder_metrics import RewarderMetrics
from tests.eventually import eventually
from tests.rewarder.conftest import ROOT, descendants, is_running, wait_for
from tests.rewarder.reward_models.conftest import call_for, count, serving

PAIR = ("a", "b")
SETTINGS = ModelSettings(device="cpu", min_hang_s=5.0)

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


async def in_a_pass(models: RewardModels, name: str, go: Path, *, number: int) -> int:
    """Wait until the model is in the forward pass of this number; return its process id."""
    await eventually((go / f"began-{number}").exists)
    pid = models._models[name].pid  # pyright: ignore[reportPrivateUsage]
    assert pid is not None
    return pid


async def outcome_of(work: "asyncio.Task[tuple[Answer, float]]") -> tuple[str, str]:
    """Return outcome and detail of a failing call."""
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


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the models' forward passes wait for files in this directory."""
    monkeypatch.setattr(model_process, "_MODULE", "tests.rewarder.reward_models.waiting_worker")
    monkeypatch.setenv("PASSES_WAIT_IN", str(tmp_path))
    return tmp_path


@pytest.mark.slow
async def test_a_deadline_is_of_one_call_and_a_hang_costs_the_calls_in_it_and_a_process(
    reward_model: Path, metrics: RewarderMetrics, go: Path
) -> None:
    name = str(reward_model)
    async with serving(SETTINGS, metrics=metrics) as models:
        # Sent while the model is loaded, the calls are in one pass. One has a short deadline, the others a long one.
        hasty = start_call(models, name, PAIR, timeout_s=1.0)
        others = [start_call(models, name, PAIR, timeout_s=60.0) for _ in range(2)]
        pid = await in_a_pass(models, name, go, number=1)
        assert await outcome_of(hasty) == ("timeout", "took longer than 1 s")
        (go / "pass-1").touch()
        for answer, _ in await asyncio.gather(*others):
            assert [verdict.outcome for verdict in answer.verdicts] == ["scored"]
        assert count(metrics, "batch_texts_count", model=name) == 1, "they were not in one pass"

        before = start_call(models, name, PAIR, timeout_s=60.0)
        await in_a_pass(models, name, go, number=2)
        hung = [start_call(models, name, PAIR, timeout_s=timeout_s) for timeout_s in (1.0, 2.0)]
        await asyncio.sleep(0)  # wait until they are sent and wait for the end of the pass
        (go / "pass-2").touch()
        await before
        assert await in_a_pass(models, name, go, number=3) == pid
        queued = start_call(models, name, PAIR, timeout_s=60.0)
        assert [(await outcome_of(call))[0] for call in hung] == ["timeout", "timeout"]
        answer, _ = await queued
        assert answer.verdicts[0].outcome == "scored"
        assert not is_running(pid)
        assert count(metrics, "kills_total", reason="timeout") == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, 2])
async def test_a_process_that_is_killed_costs_nothing_once_and_then_what_it_was_at(
    reward_model: Path, metrics: RewarderMetrics, go: Path, num_kills: int
) -> None:
    name = str(reward_model)
    async with serving(SETTINGS, metrics=metrics) as models:
        struck = start_call(models, name, PAIR, timeout_s=60.0)
        killed: list[int] = []
        for _ in range(num_kills):
            killed.append(await in_a_pass(models, name, go, number=1))
            (go / "began-1").unlink()
            os.kill(killed[-1], signal.SIGKILL)
        if num_kills == 1:
            await in_a_pass(models, name, go, number=1)
            (go / "pass-1").touch()
            answer, _ = await struck
            assert answer.verdicts[0].outcome == "scored"
        else:
            outcome, detail = await outcome_of(struck)
            assert outcome == "error"
            assert detail.startswith("the model's process died twice while it scored this: it was killed by SIGKILL")
        assert not any(map(is_running, killed))


@pytest.mark.slow
async def test_an_endless_chat_template_is_a_timeout_of_its_call_and_waiting_calls_are_scored_by_another_process(
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
        queued = start_call(models, name, PAIR, timeout_s=60.0)
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
            # The process cannot notice the rewarder's end by reading, so the kernel ends it.
            for pid in below:
                os.kill(pid, signal.SIGSTOP)
        finally:
            rewarder.kill()
        wait_for(lambda: not any(is_running(pid) for pid in below), what="the end of the model's process")
