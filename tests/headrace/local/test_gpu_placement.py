"""The GPUs of each process on a machine that has some. The devices are invented."""

import contextlib
import json
from pathlib import Path

import pytest

from headrace.local import cpu_placement
from headrace.local.gpu_placement import place, visible_gpus
from headrace.local.launch_ports import hold_ports
from headrace.local.service_specs import UpSettings, generator_spec, placement, service_specs
from headrace.local.state_dir import StateDir
from shared.errors import UserError

pytestmark = pytest.mark.unit

SHARE = {"HEADRACE_DEFAULT_ENGINE_ARGS": '{"gpu_memory_utilization": 0.4}'}


def gpus_of(num_gpus: int, num_generators: int, **environment: str) -> tuple[list[str], str]:
    """Return CUDA_VISIBLE_DEVICES of each generator, and of the trainer."""
    gpus = [str(index) for index in range(num_gpus)]
    generators, trainer = place(gpus, environment, num_at_start=num_generators, num_generators=num_generators)
    return [one["CUDA_VISIBLE_DEVICES"] for one in generators], trainer["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the launcher may use the GPUs 2, 3, 6 and 7."""

    def has_gpu(_: object) -> bool:
        return True

    def num_unused_gpus(_: object) -> int:
        return 0

    monkeypatch.setattr(cpu_placement, "has_gpu", has_gpu)
    monkeypatch.setattr(cpu_placement, "num_unused_gpus", num_unused_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,6,7")
    for name in ("HEADRACE_RANK_ENV", "HEADRACE_GPUS_PER_REPLICA", "HEADRACE_ENGINE_ARGS"):
        monkeypatch.delenv(name, raising=False)


def test_with_the_cpu_build_of_torch_the_trainer_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        return "2.13.0+cpu"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr("importlib.metadata.version", version)
    settings, state = UpSettings(tmp_path / "state"), StateDir(tmp_path / "state")
    state.make()
    with contextlib.closing(hold_ports(api_port=None, metrics_port=0, num_generators=1)) as ports:
        specs = service_specs(settings, state, keys=state.keys(), ports=ports, redis_url="redis://127.0.0.1:1/0")
    visible = {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs}
    assert visible.pop("trainer") == ""
    assert set(visible.values()) == {"2,3"}, "users' code may have another library that can use them"


def test_on_one_gpu_the_engine_leaves_memory_to_training() -> None:
    assert place(["0"], {}, num_at_start=1, num_generators=1) == ([SHARE], {})
    for own, used in (
        ({"gpu_memory_utilization": 0.3}, {"gpu_memory_utilization": 0.3}),
        ({"max_num_seqs": 64}, {"gpu_memory_utilization": 0.4, "max_num_seqs": 64}),
    ):
        environment = {"HEADRACE_DEFAULT_ENGINE_ARGS": json.dumps(own)}
        ((generator,), trainer) = place(["0"], environment, num_at_start=1, num_generators=1)
        assert json.loads(generator["HEADRACE_DEFAULT_ENGINE_ARGS"]) == used
        assert trainer == {}
    refused = {"HEADRACE_DEFAULT_ENGINE_ARGS": "[1]"}
    assert place(["0"], refused, num_at_start=1, num_generators=1) == ([{}], {}), "the generator says why"
    for environment in ({}, {"HEADRACE_ENGINE_ARGS": '{"max_num_seqs": 64}'}):
        with pytest.raises(UserError, match="2 generators would share one GPU with training"):
            place(["0"], environment, num_at_start=1, num_generators=2)
    small = {"HEADRACE_ENGINE_ARGS": '{"gpu_memory_utilization": 0.2}'}
    assert len(place(["0"], small, num_at_start=2, num_generators=2)[0]) == 2


def test_the_last_gpus_are_the_generators_and_training_has_the_rest() -> None:
    assert gpus_of(2, 1) == (["1"], "0")
    assert gpus_of(8, 1) == (["7"], "0,1,2,3,4,5,6")
    assert gpus_of(8, 3) == (["7", "6", "5"], "0,1,2,3,4")
    assert gpus_of(8, 2, HEADRACE_GPUS_PER_REPLICA="2") == (["6,7", "4,5"], "0,1,2,3")


def test_generators_use_the_gpus_that_the_user_does_not_give_to_training() -> None:
    ranks = {"HEADRACE_RANK_ENV": json.dumps({"CUDA_VISIBLE_DEVICES": "0,1"})}
    generators, trainer = place(["0", "1", "2", "3"], ranks, num_at_start=1, num_generators=2)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in generators] == ["3", "2"]
    assert trainer == {}
    everywhere = {"HEADRACE_RANK_ENV": json.dumps({"CUDA_VISIBLE_DEVICES": "0,1"})}
    assert place(["0", "1"], everywhere, num_at_start=1, num_generators=1) == ([SHARE], {})


def test_a_generator_has_the_gpus_that_the_engine_arguments_of_all_replicas_ask_for() -> None:
    parallel = json.dumps({"tensor_parallel_size": 2, "max_num_seqs": 8})
    ranks = json.dumps({"CUDA_VISIBLE_DEVICES": "2,3"})
    assert gpus_of(4, 1, HEADRACE_ENGINE_ARGS=parallel) == (["2,3"], "0,1")
    (generator,), _ = place(
        ["0", "1", "2", "3"],
        {"HEADRACE_RANK_ENV": ranks, "HEADRACE_ENGINE_ARGS": parallel},
        num_at_start=1,
        num_generators=1,
    )
    assert generator["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert gpus_of(4, 1, HEADRACE_ENGINE_ARGS=parallel, HEADRACE_GPUS_PER_REPLICA="1") == (["3"], "0,1,2")


def test_more_generators_than_gpus_beside_training_are_refused() -> None:
    with pytest.raises(UserError, match="2 generators need 2 GPUs, and 1 of 2 is not used for training"):
        gpus_of(2, 2)
    with pytest.raises(UserError, match="3 generators need 3 GPUs, and 2 of 8 are not used for training"):
        place(list("01234567"), {}, num_at_start=2, num_generators=3)


def test_every_process_of_a_launch_sees_gpus_of_its_own(tmp_path: Path, four_gpus: None) -> None:
    settings, state = UpSettings(tmp_path / "state", num_generators=2), StateDir(tmp_path / "state")
    state.make()
    with contextlib.closing(hold_ports(api_port=None, metrics_port=0, num_generators=2)) as ports:
        specs = service_specs(settings, state, keys=state.keys(), ports=ports, redis_url="redis://127.0.0.1:1/0")
        doors = ports.generators[0]
        alone = generator_spec(
            settings, state, keys=state.keys(), redis_url="redis://127.0.0.1:1/0", index=0, doors=doors,
            num_generators=1,
        )  # fmt: skip
    visible = {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs}
    assert (visible["trainer"], visible["generator-0"], visible["generator-1"]) == ("2,3", "7", "6")
    assert alone in specs, "a generator that stays when others end is not moved"


def test_simulated_generators_leave_all_gpus_to_training(tmp_path: Path, four_gpus: None) -> None:
    assert placement(UpSettings(tmp_path, num_simulated=50), 1) == ([{}], {})


def test_gpus_are_named_as_cuda_names_them() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a1, 3,-1,4"}) == ["GPU-a1", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
