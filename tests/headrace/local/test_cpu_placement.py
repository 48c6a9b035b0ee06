"""The cores of each process on a machine without a GPU."""

import json

import pytest

from headrace.local.cpu_placement import has_gpu, num_unused_gpus, place

pytestmark = pytest.mark.unit


def cores_of(variables: dict[str, str]) -> list[int]:
    return [int(core) for core in variables["VLLM_CPU_OMP_THREADS_BIND"].split(",")]


def test_two_cores_are_one_for_the_worker_and_one_for_the_rank() -> None:
    (generator,), trainer = place([0, 1], num_generators=1)
    assert generator == {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    assert trainer == {"HEADRACE_RANK_CPUS": "[1]", "HEADRACE_RANK_ENV": '{"OMP_NUM_THREADS": "1"}'}


def test_with_one_core_nothing_is_placed() -> None:
    assert place([3], num_generators=2) == ([{}, {}], {})


def test_two_generators_share_the_first_half_without_overlap() -> None:
    generators, trainer = place(range(8), num_generators=2)
    assert sorted(cores_of(generators[0]) + cores_of(generators[1])) == [0, 1, 2, 3]
    assert json.loads(trainer["HEADRACE_RANK_CPUS"]) == [4, 5, 6, 7]
    assert json.loads(trainer["HEADRACE_RANK_ENV"]) == {"OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize("num_generators", range(1, 5))
def test_no_two_generators_share_a_core_while_there_are_enough(num_generators: int) -> None:
    generators, _ = place(range(8), num_generators=num_generators)
    taken = [core for generator in generators for core in cores_of(generator)]
    assert sorted(taken) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_cores", [2, 3, 5, 16])
@pytest.mark.parametrize("num_generators", [1, 2, 3, 7])
def test_every_generator_has_a_core_and_none_is_the_ranks(num_cores: int, num_generators: int) -> None:
    generators, trainer = place(range(num_cores), num_generators=num_generators)
    assert len(generators) == num_generators
    for generator in generators:
        assert cores_of(generator)
        assert not set(cores_of(generator)) & set(json.loads(trainer["HEADRACE_RANK_CPUS"]))


def test_only_the_cores_this_process_may_use_are_given_out() -> None:
    (generator,), trainer = place([5, 2], num_generators=1)
    assert cores_of(generator) == [2]
    assert trainer["HEADRACE_RANK_CPUS"] == "[5]"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_none(hidden: str) -> None:
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": hidden})


@pytest.mark.parametrize(("build", "is_used"), [("2.13.0+cpu", False), ("2.13.0", True), ("2.13.0+cu130", True)])
def test_the_cpu_build_of_torch_uses_no_gpu(build: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        return build

    monkeypatch.setattr("importlib.metadata.version", version)
    visible = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert has_gpu(visible) is is_used
    assert num_unused_gpus(visible) == (0 if is_used else 2)
