"""Who takes part in a push, and what is said to who does not."""

from dataclasses import replace
from typing import Any

from services.trainer.push.fleet import Requirements, choose_transport, is_ready, rank_offsets, refusal
from shared.control import ReplicaInfo


def info(**changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "replica_id": "generator-1",
        "run_id": "run",
        "model": "tiny",
        "transports": ["gloo"],
        "torch_version": "2.13.0+cpu",
        "nccl_version": None,
        "num_workers": 1,
        "dtype": "float32",
        "epoch": 0,
        "policy_version": -1,
        "is_held": False,
    }
    return ReplicaInfo.model_validate(fields | changes)


GLOO = Requirements(run_id="run", transport="gloo", torch_version="2.13.0+cu130", nccl_version="2.28.9")
NCCL = Requirements(run_id="run", transport="nccl", torch_version="2.13.0+cu130", nccl_version="2.28.9")


def test_a_replica_is_ready_once_the_model_of_this_run_is_loaded() -> None:
    assert is_ready(info(), run_id="run")
    assert not is_ready(info(model=None), run_id="run")
    assert not is_ready(info(num_workers=0), run_id="run")
    assert not is_ready(info(run_id="another"), run_id="run")
    assert not is_ready(info(run_id=None), run_id="run")


def test_over_gloo_the_release_must_match_and_the_build_need_not() -> None:
    assert refusal(info(), GLOO) is None
    reason = refusal(info(torch_version="2.12.1+cpu"), GLOO)
    assert reason is not None
    assert "torch 2.12.1+cpu, the trainer 2.13.0+cu130" in reason


def test_over_nccl_the_nccl_versions_must_match() -> None:
    assert refusal(info(transports=["nccl"], nccl_version="2.28.9"), NCCL) is None
    reason = refusal(info(transports=["nccl"], nccl_version="2.27.3"), NCCL)
    assert reason is not None
    assert "NCCL 2.27.3, the trainer 2.28.9" in reason


def test_a_replica_with_another_transport_is_told_which_setting_to_change() -> None:
    reason = refusal(info(), NCCL)
    assert reason is not None
    assert "over gloo, the run pushes over nccl; set weight_transport" in reason


def test_an_engine_in_another_dtype_is_refused_if_the_run_says_its_own() -> None:
    exact = replace(GLOO, dtype="bfloat16")
    assert refusal(info(dtype="bfloat16"), exact) is None
    reason = refusal(info(dtype="float32"), exact)
    assert reason is not None
    assert "holds weights in float32, the run's are bfloat16" in reason


def test_auto_is_nccl_only_where_everybody_can() -> None:
    nccl = info(transports=["nccl"])
    assert choose_transport("auto", [nccl, nccl], has_cuda=True) == "nccl"
    assert choose_transport("auto", [nccl, info()], has_cuda=True) == "gloo"
    assert choose_transport("auto", [nccl], has_cuda=False) == "gloo"
    assert choose_transport("auto", [], has_cuda=True) == "gloo"
    assert choose_transport("nccl", [info()], has_cuda=False) == "nccl"


def test_ranks_follow_each_other_after_the_trainer() -> None:
    assert rank_offsets({"a": 1, "b": 4, "c": 2}) == ({"a": 1, "b": 2, "c": 6}, 8)
