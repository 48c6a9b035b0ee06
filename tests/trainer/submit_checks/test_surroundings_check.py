"""A submit checks that the training ranks' environment has what they need."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.surroundings_check import check_surroundings, has_hub_token
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def run(**settings: Any) -> RunConfig:
    return RunConfig(model="m", dataset_name="d.jsonl", reward_funcs=["accuracy_reward"], **settings)


def trainer(tmp_path: Path, *, gpus: str = "", token: str = "", **settings: Any) -> TrainerSettings:
    nothing = {"HUGGING_FACE_HUB_TOKEN": "", "HF_OIDC_RESOURCE": "", "HF_TOKEN_PATH": "", "HF_HOME": str(tmp_path)}
    environment = nothing | {"CUDA_VISIBLE_DEVICES": gpus, "HF_TOKEN": token}
    return TrainerSettings(rank_env=environment, runs_dir=tmp_path, **settings)


def test_several_machines_need_an_address_to_meet_at(tmp_path: Path) -> None:
    ((setting, sentence),) = check_surroundings(run(nnodes=2), trainer(tmp_path))
    assert setting == "nnodes"
    assert "HEADRACE_RENDEZVOUS_ENDPOINT is not set" in sentence
    ((setting, sentence),) = check_surroundings(run(nnodes=2), trainer(tmp_path, rendezvous_endpoint="nowhere"))
    assert (setting, "'nowhere' is not HOST:PORT" in sentence) == ("nnodes", True)
    assert check_surroundings(run(nnodes=2), trainer(tmp_path, rendezvous_endpoint="10.0.0.5:29500")) == []


def test_every_rank_needs_a_gpu_where_there_are_any(tmp_path: Path) -> None:
    ((setting, sentence),) = check_surroundings(run(nproc_per_node=3), trainer(tmp_path, gpus="0,1"))
    assert setting == "nproc_per_node"
    assert "the trainer has 2; set nproc_per_node to at most 2, or to auto" in sentence
    assert check_surroundings(run(nproc_per_node=2), trainer(tmp_path, gpus="0,1")) == []
    assert check_surroundings(run(nproc_per_node=3), trainer(tmp_path, gpus="")) == []


def test_an_upload_needs_a_token(tmp_path: Path) -> None:
    ((setting, sentence),) = check_surroundings(run(push_to_hub=True), trainer(tmp_path))
    assert setting == "push_to_hub"
    assert "set HF_TOKEN in its environment" in sentence
    assert check_surroundings(run(push_to_hub=True), trainer(tmp_path, token="a-token")) == []
    (tmp_path / "token").write_text("a-token\n")
    assert check_surroundings(run(push_to_hub=True), trainer(tmp_path)) == []


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"HF_TOKEN_PATH": "{}/here"}, "here"),
        ({"HF_HOME": "{}"}, "token"),
        ({"XDG_CACHE_HOME": "{}"}, "huggingface/token"),
        ({"HOME": "{}"}, ".cache/huggingface/token"),
    ],
)
def test_a_token_is_found_where_huggingface_hub_looks_for_it(
    environment: dict[str, str], place: str, tmp_path: Path
) -> None:
    environment = {name: value.format(tmp_path) for name, value in environment.items()}
    assert not has_hub_token(environment)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("a-token")
    assert has_hub_token(environment)
    (tmp_path / place).write_text("\n")
    assert not has_hub_token(environment)
