"""FSDP2 over NCCL: two ranks with a GPU each make the optimizer steps of one rank on a GPU."""

from pathlib import Path

import pytest
import torch

from services.trainer.policy.policy_core import PolicyCore
from tests.trainer.cores import make_config
from tests.trainer.policy.sharded_steps import NUM_STEPS, WITHIN_S, make_steps, run_ranks
from tests.trainer.policy.test_sharding import assert_same_steps, make_model, write_configs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(2 * WITHIN_S),
]


def test_two_ranks_over_nccl_make_the_steps_of_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", is_tied=False, hidden_size=28)
    config = make_config(
        model, learning_rate=1e-3, max_tokens_per_microbatch=40, max_completion_length=20, beta=0.05, max_grad_norm=1.0
    )
    by_one, by_two = tmp_path / "by_one", tmp_path / "by_two"
    by_one.mkdir()
    by_two.mkdir()
    core = PolicyCore(config, model_dir_or_id=config.model, total_steps=NUM_STEPS, device=torch.device("cuda", 0))
    make_steps(core, by_one)
    write_configs(by_two, {"untied": config})
    run_ranks(by_two, num_ranks=2)
    # Kernels on GPUs sum in another order for other shapes, which AdamW amplifies.
    assert_same_steps(by_two / "untied", by_one, losses_agree=1e-3, weights_agree=1e-4)
