"""One model in a real process: what it says, how calls are put together, and what it cannot score."""

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.worker_frames import Inspected
from tests.rewarder.conftest import ROOT, descendants
from tests.rewarder.reward_models.conftest import call_for, count, serving
from tests.tiny_reward_model import make_tiny_reward_model

ALONE = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.reward_models import RewardModels

async def main():
    models = RewardModels(
        ModelSettings(device="cpu"), metrics=RewardModelMetrics(CollectorRegistry()), in_use=tuple
    )
    answer, _ = await models.call(sys.argv[1], RewardCall(["a"], ["b"], {}), timeout_s=60, lane="x")
    await models.close()
    print(answer.verdicts[0].outcome, sorted({"torch", "transformers"} & set(sys.modules)))

asyncio.run(main())
"""


async def test_a_directory_is_a_reward_model_and_its_scores_carry_a_version(reward_model: Path) -> None:
    name = str(reward_model)
    before = descendants(os.getpid())
    async with serving() as models:
        assert await models.knows(name)
        inspected = await models.inspect(name)
        assert isinstance(inspected, Inspected), inspected
        assert inspected.kind == "reward-model"
        assert inspected.summary.startswith("Qwen3ForSequenceClassification on cpu in float32, version ")
        answer, seconds = await models.call(name, call_for(("1+1=", "2"), ("1+1=", "3")), timeout_s=60, lane="a")
        assert [verdict.outcome for verdict in answer.verdicts] == ["scored", "scored"]
        assert answer.verdicts[0].value != answer.verdicts[1].value
        assert len(answer.version) == 12
        assert inspected.summary.endswith(answer.version)
        assert seconds < 60
    assert descendants(os.getpid()) - before == set()


def test_torch_is_never_imported_where_the_rewarder_runs(reward_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(reward_model)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "scored []\n", done.stderr


async def test_calls_that_come_together_share_a_forward_pass_and_each_gets_its_own_numbers(
    reward_model: Path, metrics: RewarderMetrics
) -> None:
    name = str(reward_model)
    calls = [call_for(*((f"{group}+{index}=", "7" * (index + 1)) for index in range(4))) for group in range(5)]
    async with serving(metrics=metrics) as models:
        # Sent while the model is being loaded, they are all there when it is.
        together = await asyncio.gather(*(models.call(name, call, timeout_s=60, lane="a") for call in calls))
        assert count(metrics, "batch_texts_count", model=name) == 1
        assert count(metrics, "batch_texts_sum", model=name) == 20
        alone = [await models.call(name, call, timeout_s=60, lane="a") for call in calls]
        assert count(metrics, "batch_texts_count", model=name) == 6
    for (answer, _), (same, _) in zip(together, alone, strict=True):
        values = [verdict.value for verdict in same.verdicts]
        assert [verdict.value for verdict in answer.verdicts] == pytest.approx(values, abs=1e-5)
        assert len(set(values)) == 4
    assert count(metrics, "loads_total", result="loaded") == 1
    assert count(metrics, "forward_seconds_count", model=name) == 6


async def test_a_pass_has_no_more_tokens_than_the_setting_says(reward_model: Path, metrics: RewarderMetrics) -> None:
    name = str(reward_model)
    settings = ModelSettings(device="cpu", max_batch_tokens=20)
    # 10, 9, 2, 2 and 30 tokens: one pass of the longest, one of 2 x 10, one of 2 x 2.
    call = call_for(("a" * 8, "bb"), ("a" * 7, "bb"), ("a", "b"), ("c", "d"), ("a" * 28, "bb"))
    async with serving(settings, metrics=metrics) as models:
        answer, _ = await models.call(name, call, timeout_s=60, lane="a")
    assert [verdict.outcome for verdict in answer.verdicts] == ["scored"] * 5
    assert count(metrics, "batch_texts_count", model=name) == 3
    assert count(metrics, "tokens_total", model=name, kind="text") == 53
    assert count(metrics, "tokens_total", model=name, kind="padding") == 1


async def test_what_the_model_cannot_score_costs_that_completion_alone(reward_model: Path) -> None:
    call = RewardCall(
        prompts=["a", "", "a", [{"role": "user", "content": "a"}]],
        completions=["b", "", [{"role": "assistant", "content": "b"}], "b"],
        columns={},
    )
    async with serving() as models:
        answer, _ = await models.call(str(reward_model), call, timeout_s=60, lane="a")
    assert [verdict.outcome for verdict in answer.verdicts] == ["scored", "error", "error", "error"]
    assert answer.verdicts[1].detail == "prompt and completion are empty: there is no token to score"
    assert answer.verdicts[2].detail == "prompt and completion must both be text, or both be messages"


async def test_a_model_that_gives_nan_is_invalid_and_never_a_number(tmp_path: Path) -> None:
    directory = make_tiny_reward_model(tmp_path / "nan")
    weights = load_file(directory / "model.safetensors")
    # Texts that end in "z" meet a row of NaN; attention is causal, so others do not.
    weights["model.embed_tokens.weight"][4 + 25] = math.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert torch.isnan(weights["model.embed_tokens.weight"]).any()
    async with serving() as models:
        answer, _ = await models.call(str(directory), call_for(("a", "z"), ("a", "b")), timeout_s=60, lane="a")
    assert [(verdict.outcome, verdict.value is None) for verdict in answer.verdicts] == [
        ("invalid", True),
        ("scored", False),
    ]
    assert answer.verdicts[0].detail == "the model gave nan"
