"""LoRA runs on two training ranks, in real processes under torchrun, against one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.policy.lora import adapters
from shared.run_options.run_config import RunConfig
from tests.trainer.cores import make_config, make_core
from tests.trainer.policy.sharded_steps import NUM_STEPS, WITHIN_S, make_steps, start
from tests.trainer.tensor_files import load_file

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02}
"""Tolerance of the adapters after all steps. Layers are gathered in the run's dtype, so bfloat16 rounds elsewhere."""


def pushed(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 20)
def test_adapters_beside_a_sharded_base_learn_what_they_learn_on_one_rank(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "use_peft": True,
        "lora_r": 3,
        "beta": 0.05,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
    }
    configs: dict[str, RunConfig] = {dtype: make_config(tiny_model, dtype=dtype, **settings) for dtype in TOLERANCES}
    for dtype, config in configs.items():
        (tmp_path / dtype).mkdir()
        (tmp_path / dtype / "config.json").write_text(config.model_dump_json())
    ranks = start(tmp_path, num_ranks=2)
    try:
        output, _ = ranks.communicate(timeout=WITHIN_S)
    finally:
        ranks.terminate()
    assert ranks.returncode == 0, output

    for dtype, tolerance in TOLERANCES.items():
        core = make_core(tiny_model, total_steps=NUM_STEPS, dtype=dtype, **settings)
        alone = tmp_path / f"alone in {dtype}"
        alone.mkdir()
        make_steps(core, alone)
        mine, theirs = pushed(tmp_path / dtype), pushed(alone)
        assert mine.keys() == theirs.keys() == adapters(core.lm).keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name].float(), tensor.float(), rtol=0, atol=tolerance, msg=name)
        found, expected = (json.loads((path / "result.json").read_text()) for path in (tmp_path / dtype, alone))
        for step, (here, there) in enumerate(zip(found, expected, strict=True)):
            for metric in ("loss", "kl"):
                value = pytest.approx(there["metrics"][metric], rel=10 * tolerance, abs=tolerance)
                assert here["metrics"][metric] == value, (dtype, step, metric)
    troubles = json.loads((tmp_path / "troubles.json").read_text())
    assert troubles["described"] == troubles["read"]
    assert [name for name, _, _ in troubles["read"]] == list(adapters(make_core(tiny_model, **settings).lm))
