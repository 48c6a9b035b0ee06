"""One model in a real process: its rewards, how calls are batched, and what it cannot score.

The processes are shared, because each takes seconds to import torch.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import safetensors.torch
import torch

from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_models import RewardModels
from services.rewarder.rewarder_metrics import RewarderMetrics
from tests.rewarder.reward_models.conftest import call_for, count, serving
from tests.tiny_reward_model import make_tiny_reward_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS = ModelSettings(device="cpu", max_batch_tokens=200, max_loaded=3, check_timeout_s=100.0)


@pytest.fixture(scope="module")
def counted() -> RewarderMetrics:
    return RewarderMetrics()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(counted: RewarderMetrics) -> AsyncIterator[RewardModels]:
    async with serving(SETTINGS, metrics=counted) as models:
        yield models


async def test_a_directory_is_a_reward_model_and_its_scores_carry_a_version(
    models: RewardModels, reward_model: Path
) -> None:
    name = str(reward_model)
    assert await models.knows(name)
    inspected = await models.inspect(name)
    assert isinstance(inspected, Inspected), inspected
    assert inspected.kind == "reward-model"
    assert inspected.summary == "Qwen3ForSequenceClassification on cpu in float32"
    answer, seconds = await models.call(name, call_for(("1+1=", "2"), ("1+1=", "3")), timeout_s=60, lane="a")
    assert [verdict.outcome for verdict in answer.verdicts] == ["scored", "scored"]
    assert answer.verdicts[0].value != answer.verdicts[1].value
    assert len(answer.version) == 12
    assert inspected.version == answer.version
    assert seconds < 60


async def test_calls_that_come_together_share_a_forward_pass_and_each_gets_its_own_numbers(
    models: RewardModels, other_reward_model: Path, counted: RewarderMetrics
) -> None:
    name = str(other_reward_model)
    calls = [call_for(*((f"{group}+{index}=", "7" * (index + 1)) for index in range(4))) for group in range(5)]
    # They are sent while the model is loaded, so all of them are waiting when it is ready.
    together = await asyncio.gather(*(models.call(name, call, timeout_s=60, lane="a") for call in calls))
    assert count(counted, "batch_texts_count", model=name) == 1
    assert count(counted, "batch_texts_sum", model=name) == 20
    alone = [await models.call(name, call, timeout_s=60, lane="a") for call in calls]
    assert count(counted, "batch_texts_count", model=name) == 6
    assert count(counted, "forward_seconds_count", model=name) == 6
    for (answer, _), (same, _) in zip(together, alone, strict=True):
        values = [verdict.value for verdict in same.verdicts]
        assert [verdict.value for verdict in answer.verdicts] == pytest.approx(values, abs=1e-5)
        assert len(set(values)) == 4


async def test_a_pass_has_no_more_tokens_than_the_setting_says(
    models: RewardModels, reward_model: Path, counted: RewarderMetrics
) -> None:
    name = str(reward_model)

    def passes() -> float:
        return count(counted, "batch_texts_count", model=name)

    def tokens(kind: str) -> float:
        return count(counted, "tokens_total", model=name, kind=kind)

    before = passes(), tokens("text"), tokens("padding")
    # 100, 90, 20, 20 and 250 tokens: the longest in a pass of its own, then two of 100, then two of 20.
    call = call_for(*(("a" * (length - 2), "bb") for length in (100, 90, 20, 20, 250)))
    answer, _ = await models.call(name, call, timeout_s=60, lane="a")
    assert [verdict.outcome for verdict in answer.verdicts] == ["scored"] * 5
    assert (passes() - before[0], tokens("text") - before[1], tokens("padding") - before[2]) == (3, 480, 10)


async def test_a_completion_that_the_model_cannot_score_does_not_affect_the_others(
    models: RewardModels, reward_model: Path
) -> None:
    call = RewardCall(
        prompts=["a", "", "a", [{"role": "user", "content": "a"}]],
        completions=["b", "", [{"role": "assistant", "content": "b"}], "b"],
        columns={},
    )
    answer, _ = await models.call(str(reward_model), call, timeout_s=60, lane="a")
    assert [verdict.outcome for verdict in answer.verdicts] == ["scored", "error", "error", "error"]
    assert answer.verdicts[1].detail == "prompt and completion are empty: there is no token to score"
    assert answer.verdicts[2].detail == "prompt and completion must both be text, or both be messages"


async def test_a_chat_template_that_fails_is_a_sentence(models: RewardModels, reward_model: Path) -> None:
    conversation = RewardCall(
        prompts=[[{"role": "user", "content": "a"}]],
        completions=[[{"role": "assistant", "content": "b"}]],
        columns={},
        chat_template_kwargs={"refuse": "not like this"},
    )
    answer, _ = await models.call(str(reward_model), conversation, timeout_s=60, lane="a")
    assert answer.verdicts[0].outcome == "error"
    assert answer.verdicts[0].detail == "the chat template failed: TemplateError: not like this"


async def test_a_model_that_gives_nan_is_invalid_and_never_a_number(models: RewardModels, tmp_path: Path) -> None:
    directory = make_tiny_reward_model(tmp_path / "nan")
    files: Any = safetensors.torch  # partly untyped
    weights: dict[str, torch.Tensor] = files.load_file(directory / "model.safetensors")
    # A text with "z" in it gets a row of NaN weights.
    weights["model.embed_tokens.weight"][4 + 25] = math.nan
    assert torch.isnan(weights["model.embed_tokens.weight"]).any()
    files.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    answer, _ = await models.call(str(directory), call_for(("a", "z"), ("a", "b")), timeout_s=60, lane="a")
    spoilt, sound = answer.verdicts
    assert (spoilt.outcome, spoilt.value, spoilt.detail) == ("invalid", None, "the model gave nan")
    assert sound.outcome == "scored"
