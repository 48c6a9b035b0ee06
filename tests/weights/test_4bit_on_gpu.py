"""A QLoRA run on a GPU: trainer and engine hold the same 4-bit base, and the pushed adapters are used on it."""

from pathlib import Path

import pytest
import torch

from services.trainer.policy.policy_core import PolicyCore
from services.trainer.push.prober import Prober
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.trainer.cores import make_config, random_rows
from tests.weights.gpu_replica import gpu_replica
from tests.weights.known_weights import LORA_ALPHA, LORA_RANK, PROMPT_IDS
from tests.weights.replica import ReplicaProcess
from tests.weights.senders import make_sender

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(540),
]

ROUNDING = 0.5
"""In nats, of bfloat16. A base that is not quantised, or is quantised differently, differs by more."""


async def mean_difference(replica: ReplicaProcess, core: PolicyCore, *, version: int) -> float:
    """Return the mean difference of the logprobs that the replica and the trainer give its sample."""
    sample = await replica.sample(PROMPT_IDS, max_tokens=100)
    assert sample.spans == [(version, 0, 100)]
    expected = core.probe([*PROMPT_IDS, *sample.token_ids])[len(PROMPT_IDS) - 1 :]
    return float(abs(torch.tensor(sample.logprobs) - torch.tensor(expected.tolist())).mean())


async def test_trainer_and_engine_have_the_same_policy(
    model_dir: Path, tmp_path: Path, redis: Redis, run_keys: RunKeys, incarnation: int
) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("vllm_bnb_plugin")
    config = make_config(
        model_dir,
        use_peft=True,
        load_in_4bit=True,
        lora_r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        dtype="bfloat16",
        learning_rate=0.1,
    )
    core = PolicyCore(config, model_dir_or_id=str(model_dir), total_steps=10, device=torch.device("cuda", 0))
    prober = Prober(core.probe, token_ids=PROMPT_IDS, tolerance=4.0)
    more = {"--lora-rank": str(LORA_RANK), "--lora-alpha": str(LORA_ALPHA), "--base": "4-bit"}
    with gpu_replica(model_dir, tmp_path, gpus=(0,), more=more) as replica:
        await replica.register(redis, run_keys)
        sender = make_sender(redis, incarnation, transport="ipc", push_timeout_s=60.0)
        first = core.probe(PROMPT_IDS)
        for version in (0, 1):
            result = await sender.push(core.named_weights, policy_version=version, prober=prober)
            assert result.is_confirmed, result
            assert await mean_difference(replica, core, version=version) < ROUNDING / 3
            core.accumulate(random_rows(6, seed=version))
            core.step()
        await sender.close()
    assert abs(core.probe(PROMPT_IDS) - first).max() > ROUNDING, "the steps changed next to nothing"
