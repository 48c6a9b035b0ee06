from typing import Any

import pytest

from services.trainer.submit_checks.gpu_check import what_needs_a_gpu
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def run(**settings: Any) -> RunConfig:
    return RunConfig(model="m", dataset_name="d.jsonl", reward_funcs=["accuracy_reward"], **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [("attn_implementation", "flex_attention"), ("use_liger_kernel", True), ("weight_transport", "nccl")],
)
def test_what_needs_a_gpu_is_refused_at_submit_where_there_is_none(name: str, value: Any) -> None:
    ((field, reason),) = what_needs_a_gpu(run(**{name: value}), NO_GPU)
    assert field == name
    assert reason == f"{name}: {value} needs a GPU, and the trainer has none; leave it out"


def test_what_runs_anywhere_is_not_refused() -> None:
    assert what_needs_a_gpu(run(attn_implementation="eager", weight_transport="gloo"), NO_GPU) == []
    assert what_needs_a_gpu(run(), NO_GPU) == []
