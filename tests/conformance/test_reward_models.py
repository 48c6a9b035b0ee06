"""A reward model gives the same rewards as in TRL: text and conversations, with and without a pad token."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.reward_models import RewardModels
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.messages import Completion, Prompt
from tests.conformance.batches import random_groups
from tests.conformance.conftest import Models
from tests.conformance.oracle import make_oracle
from tests.tiny_reward_model import make_tiny_reward_model

TEXTS: tuple[list[Prompt], list[Completion]] = (
    ["1+1=", "1+1=", "what is 12", "a", ""],
    ["2", "two and two is four", "", "b" * 150, "c"],
)
MESSAGES: tuple[list[Prompt], list[Completion]] = (
    [[{"role": "system", "content": "add"}, {"role": "user", "content": text}] for text in ("1+1", "12+30", "x")],
    [[{"role": "assistant", "content": text}] for text in ("2", "this is 42 I think", "")],
)


CALLS = (
    RewardCall(*TEXTS, columns={}),
    RewardCall(*MESSAGES, columns={}),
    RewardCall(*MESSAGES, columns={}, chat_template_kwargs={"shout": True}),
)


def theirs(trainer: Any, call: RewardCall) -> list[list[float]]:
    """Return TRL's numbers, one list per completion."""
    trainer.chat_template_kwargs = call.chat_template_kwargs
    inputs = [{"prompt": prompt} for prompt in call.prompts]
    found: list[list[float]] = trainer._calculate_rewards(inputs, call.prompts, call.completions, None).tolist()
    return found


@pytest.mark.slow
async def test_a_reward_model_gives_trls_numbers(models: Models, tmp_path: Path, tell: Callable[[str], None]) -> None:
    directories = [make_tiny_reward_model(tmp_path / "padded"), make_tiny_reward_model(tmp_path / "unpadded", seed=1)]
    tokenizers: Any = PreTrainedTokenizerFast  # partly untyped
    tokenizer = tokenizers.from_pretrained(directories[1])
    tokenizer.pad_token = None
    tokenizer.save_pretrained(directories[1])
    assert json.loads((directories[1] / "tokenizer_config.json").read_text()).get("pad_token") is None
    names = [str(directory) for directory in directories]
    trainer = make_oracle(models.start, random_groups(1, 8, seed=0), tmp_path / "output", reward_funcs=list(names))
    metrics = RewardModelMetrics(RewarderMetrics().registry)
    source = RewardModels(ModelSettings(device="cpu"), metrics=metrics, in_use=tuple)
    furthest = 0.0
    try:
        for call in CALLS:
            answers = await asyncio.gather(*(source.call(name, call, timeout_s=60, lane="a") for name in names))
            ours = zip(*([verdict.value for verdict in answer.verdicts] for answer, _ in answers), strict=True)
            expected = theirs(trainer, call)
            assert len({value for row in expected for value in row}) == 2 * len(expected), "alike, so it shows nothing"
            for found, right in zip(ours, expected, strict=True):
                assert list(found) == pytest.approx(right, abs=1e-5)
                furthest = max(furthest, *(abs(a - b) for a, b in zip(found, right, strict=True) if a is not None))
    finally:
        await source.close()
    tell(f"reward models: text and conversations at most {furthest:.1e} from TRL's numbers")
