"""The number of training ranks of a run, their command, and the messages when they end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.ranks.rank_words import Word, root_cause
from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_command import rank_command, ranks_per_node, split_endpoint
from services.trainer.supervision.rank_launcher import Node, launch
from shared.errors import UserError
from shared.gpus import num_gpus
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(runs_dir=tmp_path, rank_command=["rank"], rank_env={"CUDA_VISIBLE_DEVICES": ""})


def test_the_ranks_of_a_launcher_have_as_long_to_end_as_a_single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = pytest.importorskip("torch.distributed.launcher.api")
    configs: list[Any] = []

    def elastic_launch(config: Any, _command: str) -> Callable[..., None]:
        configs.append(config)
        return lambda *_: None

    monkeypatch.setattr(api, "elastic_launch", elastic_launch)
    launch(Node("run-a", 2, 1, 0, "127.0.0.1:0", ("rank",), timeout_s=20, stop_grace_s=299.5))
    assert configs[0].shutdown_timeout == 300


def test_the_launcher_is_told_the_grace_of_its_trainer(settings: TrainerSettings) -> None:
    environment = settings.model_copy(update={"rank_stop_grace_s": 120.0}).rank_environment()
    assert environment["HEADRACE_RANK_STOP_GRACE_S"] == "120.0"


def test_ranks_count_gpus_as_generators_do_unless_the_operator_chose_another_order(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert settings.rank_environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert settings.rank_environment()["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_one_rank_is_started_without_a_launcher(run_config: RunConfig, settings: TrainerSettings) -> None:
    assert rank_command("run-a", run_config, settings) == ["rank", "run-a"]


def test_several_ranks_are_started_by_the_launcher(run_config: RunConfig, settings: TrainerSettings) -> None:
    config = run_config.model_copy(update={"nproc_per_node": 3})
    _, *rest = rank_command("run-a", config, settings)
    assert rest == ["-m", "services.trainer.supervision.rank_launcher", "--nproc-per-node", "3", "run-a", "--", "rank"]


def test_several_machines_need_a_place_to_meet(run_config: RunConfig, settings: TrainerSettings) -> None:
    config = run_config.model_copy(update={"nnodes": 2})
    with pytest.raises(UserError, match="HEADRACE_RENDEZVOUS_ENDPOINT is not set"):
        rank_command("run-a", config, settings)
    met = settings.model_copy(update={"rendezvous_endpoint": "10.0.0.5:29500"})
    command = rank_command("run-a", config, met)
    assert command[command.index("--nnodes") :] == [
        "--nnodes", "2", "--endpoint", "10.0.0.5:29500", "run-a", "--", "rank",
    ]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["29500", ":29500", "trainer-0:", "trainer-0:http"])
def test_an_endpoint_without_host_or_port_is_refused(
    endpoint: str, run_config: RunConfig, settings: TrainerSettings
) -> None:
    config = run_config.model_copy(update={"nnodes": 2})
    with pytest.raises(UserError, match="HEADRACE_RENDEZVOUS_ENDPOINT: "):
        rank_command("run-a", config, settings.model_copy(update={"rendezvous_endpoint": endpoint}))
    assert split_endpoint("[::1]:29500") == ("::1", 29500)


def test_auto_is_one_rank_a_gpu_and_one_without(run_config: RunConfig) -> None:
    assert ranks_per_node(run_config, {"CUDA_VISIBLE_DEVICES": "2,5"}) == 2
    assert ranks_per_node(run_config, {"CUDA_VISIBLE_DEVICES": ""}) == 1


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("3,1,0", 3), ("0,-1,2", 1), ("", 0), ("GPU-ab,GPU-cd", 2)])
def test_visible_devices_are_counted_as_cuda_counts_them(visible: str, count: int) -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_without_a_choice_every_gpu_of_the_machine_counts(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus({}, devices=tmp_path) == 2


def word(message: str, *, at_s: float = 0.0, is_loss: bool = False) -> Word:
    return Word(message, status=1, is_loss=is_loss, at_s=at_s)


def test_the_first_rank_that_failed_by_itself_is_the_cause() -> None:
    words = {
        0: word("lost the others", is_loss=True),
        1: word("out of memory", at_s=2.0),
        2: word("disk full", at_s=1.0),
    }
    assert root_cause(words, {0: 9}) == "training rank 2: disk full"


def test_a_kill_explains_what_the_others_only_saw() -> None:
    assert root_cause({0: word("lost the others", is_loss=True)}, {1: 9}) == "training rank 1 was killed by signal 9"


def test_rank_0_speaks_for_the_run() -> None:
    assert root_cause({0: word("the data set is gone")}, {}) == "the data set is gone"


def test_an_unknown_cause_is_not_invented() -> None:
    assert root_cause({}, {}) == ""
    assert root_cause({3: word("lost the others", is_loss=True)}, {}) == "lost the others"
