"""Makes trainer cores and training rows for tests."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from shared.arrays import Logprobs
from shared.run_options.run_config import RunConfig
from tests.tiny_model import VOCAB_SIZE

CPU = torch.device("cpu")


def make_config(model: Path, **settings: Any) -> RunConfig:
    """Return a run config with the simplest training settings, except for the given ones."""
    plain: dict[str, Any] = {
        "model": str(model),
        "dataset_name": "train.jsonl",
        "reward_funcs": ["accuracy_reward"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    return RunConfig.model_validate(plain | settings)


def make_core(model: Path, *, total_steps: int = 10, **settings: Any) -> PolicyCore:
    """Return a core on the CPU."""
    return PolicyCore(make_config(model, **settings), model_dir_or_id=str(model), total_steps=total_steps, device=CPU)


GRADIENT_DESCENT: Any = {"learning_rate": 1e6, "adam_epsilon": 1e6}
"""Settings with which AdamW's first step is ``weights -= gradient`` to one part in a million: an epsilon much larger
than the second moment cancels the learning rate.
"""


ODD_GENERATION_CONFIG: Any = {"do_sample": False, "temperature": 0.7}
"""Generation settings that transformers loads with a warning but refuses to save: a temperature without sampling."""


def copy_with_odd_generation(model: Path, to: Path) -> Path:
    """Copy a model to ``to`` with generation settings that transformers refuses to save, and return ``to``."""
    shutil.copytree(model, to)
    (to / "generation_config.json").write_text(json.dumps(ODD_GENERATION_CONFIG))
    # transformers copies this setting into the generation config of a model that is created from its config only.
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    return to


def assert_odd_generation(model: Path) -> None:
    """Assert that a model directory still has those settings."""
    found = json.loads((model / "generation_config.json").read_text())
    assert {name: found.get(name) for name in ODD_GENERATION_CONFIG} == ODD_GENERATION_CONFIG


def make_row(
    token_ids: Sequence[int], loss_mask: Sequence[int], *, advantage: float = 1.0, generator_logprob: float = -2.0
) -> TrainRow:
    """Return a row in which all sampled tokens have the same generator logprob."""
    return TrainRow(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.uint8),
        generator_logprobs=np.full(sum(loss_mask), generator_logprob, dtype=np.float32),
        advantage=advantage,
    )


def per_token_advantages(row: TrainRow) -> Logprobs:
    """Return an advantage for each sampled token, with both signs."""
    return np.linspace(-1.5, 1.0, row.num_sampled).astype(np.float32)


def random_rows(count: int, *, seed: int = 0) -> list[TrainRow]:
    """Return rows of several lengths with advantages of both signs; some rows have two sampled stretches."""
    rng = np.random.default_rng(seed)
    rows: list[TrainRow] = []
    for index in range(count):
        num_prompt, num_sampled = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        mask = [0] * num_prompt + [1] * num_sampled
        if index % 3 == 0:
            mask += [0, 0, 1]
        rows.append(
            TrainRow(
                token_ids=rng.integers(4, VOCAB_SIZE, len(mask)).astype(np.int32),
                loss_mask=np.array(mask, dtype=np.uint8),
                generator_logprobs=(-4 + rng.normal(0, 1, sum(mask))).clip(max=-0.01).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return rows


def weights(core: PolicyCore) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {name: tensor.clone() for name, tensor in core.named_weights()}


def assert_same_weights(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Assert that all bits are equal."""
    assert list(left) == list(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
