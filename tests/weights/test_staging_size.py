"""The staging memory that a generator allocates ahead is that of the trainer's pushes."""

from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

from services.generator.engine.engine_config import make_vllm_config
from services.generator.engine.engine_spec import EngineSpec
from services.generator.worker.staged_weights import staging_bytes
from services.trainer.policy.trained_weights import AllWeights, LiveWeights
from services.trainer.push.packing import announce


@pytest.mark.parametrize("directory", ["model_dir", "tied_model_dir"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checkpoint_has_the_bytes_that_the_trainer_pushes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, directory: str, dtype: str
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # otherwise the import compiles, and warns
    from services.generator.worker.model_check import checkpoint_specs

    model_dir: Path = request.getfixturevalue(directory)
    spec = EngineSpec(str(model_dir), None, dtype, 256)
    specs = checkpoint_specs(make_vllm_config(spec, {}, has_cuda=False))
    lm: Any = cast(Any, AutoModelForCausalLM).from_pretrained(model_dir, dtype=torch.float32)
    announced = announce(LiveWeights(AllWeights(lm), dtype=getattr(torch, dtype)).described())
    pushed = list(announced)
    assert {(name, kind, tuple(shape)) for name, kind, shape in specs} == set(pushed)
    assert staging_bytes(specs) == staging_bytes(pushed)
