"""Which replicas take part in a push, and the messages to the others."""

from typing import Any

import pytest

from services.trainer.push.membership import Abilities, choose_transport, is_ready, rank_offsets, refusal
from shared.control import ReplicaInfo, Transport

pytestmark = pytest.mark.unit


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


def reason_against(replica: ReplicaInfo, *, transport: Transport, dtype: str | None = None) -> str | None:
    own = Abilities(torch_version="2.13.0+cu130", nccl_version="2.28.9", device_uuid="gpu-0")
    return refusal(replica, transport=transport, own=own, dtype=dtype)


def test_a_replica_is_ready_once_the_model_of_this_run_is_loaded() -> None:
    assert is_ready(info(), run_id="run")
    assert not is_ready(info(model=None), run_id="run")
    assert not is_ready(info(num_workers=0), run_id="run")
    assert not is_ready(info(run_id="another"), run_id="run")
    assert not is_ready(info(run_id=None), run_id="run")


def test_over_gloo_the_release_must_match_and_the_build_need_not() -> None:
    assert reason_against(info(), transport="gloo") is None
    reason = reason_against(info(torch_version="2.12.1+cpu"), transport="gloo")
    assert reason is not None
    assert "torch 2.12.1+cpu, the trainer 2.13.0+cu130" in reason


def test_over_nccl_the_nccl_versions_must_match() -> None:
    assert reason_against(info(transports=["nccl"], nccl_version="2.28.9"), transport="nccl") is None
    reason = reason_against(info(transports=["nccl"], nccl_version="2.27.3"), transport="nccl")
    assert reason is not None
    assert "NCCL 2.27.3, the trainer 2.28.9" in reason


def test_the_error_for_another_transport_names_the_setting_to_change() -> None:
    reason = reason_against(info(), transport="nccl")
    assert reason is not None
    assert "over gloo, the run pushes over nccl; set weight_transport" in reason


def test_an_engine_in_another_dtype_is_refused_if_the_run_says_its_own() -> None:
    assert reason_against(info(dtype="bfloat16"), transport="gloo", dtype="bfloat16") is None
    reason = reason_against(info(dtype="float32"), transport="gloo", dtype="bfloat16")
    assert reason is not None
    assert "holds weights in float32, the run's are in bfloat16" in reason


GPU = Abilities(torch_version="2.13.0+cu130", nccl_version="2.28.9", device_uuid="gpu-0")
CPU = Abilities(torch_version="2.13.0+cpu", nccl_version=None)


def on_gpu(uuid: str | None, **changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {"transports": ["nccl", "ipc", "gloo", "disk"], "nccl_version": "2.28.9"}
    return info(device_uuid=uuid, **(fields | changes))


@pytest.mark.parametrize(
    ("infos", "own", "expected"),
    [
        ([on_gpu("gpu-0")], GPU, ("ipc", "trainer and generators use the same GPU")),
        ([on_gpu("gpu-0"), on_gpu("gpu-0")], GPU, ("ipc", "trainer and generators use the same GPU")),
        (
            [on_gpu("gpu-1"), on_gpu(None, num_workers=2)],
            GPU,
            ("nccl", "trainer and generators have GPUs of their own and NCCL 2.28.9"),
        ),
        (
            [on_gpu("gpu-0"), on_gpu("gpu-1")],
            GPU,
            ("gloo", "not nccl, because generator-1 shares its GPU, which NCCL refuses"),
        ),
        (
            [on_gpu("gpu-1"), on_gpu("gpu-1")],
            GPU,
            ("gloo", "not nccl, because generator-1 shares its GPU, which NCCL refuses"),
        ),
        (
            [on_gpu("gpu-1", nccl_version="2.27.3")],
            GPU,
            ("gloo", "not nccl, because generator-1 has NCCL 2.27.3 and the trainer 2.28.9"),
        ),
        ([on_gpu("gpu-1"), info()], GPU, ("gloo", "not nccl, because generator-1 has no GPU")),
        ([on_gpu("gpu-1")], CPU, ("gloo", "not nccl, because the trainer has no GPU")),
        ([info(transports=["simulated"])], CPU, ("simulated", "all generators are simulated")),
        ([info(transports=["simulated"]), info()], CPU, ("gloo", "not nccl, because the trainer has no GPU")),
        ([], GPU, ("gloo", "no generator is available yet")),
    ],
)
def test_auto_takes_the_fastest_that_everybody_has_and_says_why(
    infos: list[ReplicaInfo], own: Abilities, expected: tuple[str, str]
) -> None:
    assert choose_transport("auto", infos, own) == expected


def test_the_transport_of_the_run_is_used() -> None:
    assert choose_transport("nccl", [info()], CPU) == ("nccl", "the run says weight_transport: nccl")
    assert choose_transport("disk", [on_gpu("gpu-0")], GPU) == ("disk", "the run says weight_transport: disk")


def test_one_gpu_is_for_ipc_and_several_are_for_nccl() -> None:
    assert reason_against(on_gpu("gpu-0"), transport="ipc") is None
    reason = reason_against(on_gpu("gpu-1"), transport="ipc")
    assert reason is not None
    assert "on GPU gpu-1, the trainer on gpu-0, and ipc is for one GPU; set weight_transport: auto or nccl" in reason
    assert reason_against(on_gpu("gpu-1"), transport="nccl") is None
    reason = reason_against(on_gpu("gpu-0"), transport="nccl")
    assert reason is not None
    assert "NCCL refuses two ranks on one; set weight_transport: auto or ipc" in reason


def test_a_transport_without_a_communicator_does_not_need_the_same_torch_release() -> None:
    assert reason_against(info(transports=["gloo", "disk"], torch_version="2.12.1+cpu"), transport="disk") is None
    assert reason_against(info(transports=["simulated"], torch_version=""), transport="simulated") is None


def test_ranks_follow_each_other_after_the_trainer() -> None:
    assert rank_offsets({"a": 1, "b": 4, "c": 2}) == ({"a": 1, "b": 2, "c": 6}, 8)
