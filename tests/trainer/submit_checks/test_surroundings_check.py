"""A submit checks that the training ranks have what they need. A run that is only validated leaves no files."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks import surroundings_check
from services.trainer.submit_checks.surroundings_check import (
    check_environment,
    check_surroundings,
    check_weight_dir,
    has_hub_token,
    is_installed,
)
from shared.install_commands import install_extras, install_packages
from shared.run_options.run_config import RunConfig
from tests.closed_directory import close_directory

pytestmark = pytest.mark.unit

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FOUR_BITS = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16"}


def run(**settings: Any) -> RunConfig:
    return RunConfig(model="m", dataset_name="d.jsonl", reward_funcs=["accuracy_reward"], **settings)


def has_all_but(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Play a machine that has every package except some."""

    def has(name: str) -> bool:
        return name not in missing

    monkeypatch.setattr(surroundings_check, "is_installed", has)


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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attn_implementation": "flex_attention"}, "attn_implementation: flex_attention needs a GPU; leave it out"),
        ({"weight_transport": "nccl"}, "weight_transport: nccl needs a GPU; leave it out"),
        ({"use_liger_kernel": True}, "use_liger_kernel needs a GPU; leave it out"),
        (FOUR_BITS, "load_in_4bit needs a GPU; leave it out"),
        ({"optim": "paged_adamw_8bit"}, "optim: paged_adamw_8bit needs a GPU; adamw_8bit does not"),
    ],
)
def test_an_option_that_needs_a_gpu_is_refused_at_submit_without_one(settings: dict[str, Any], sentence: str) -> None:
    ((option, said),) = check_environment(run(**settings), NO_GPU)
    assert option in settings
    assert said.replace(", and the trainer has none", "") == sentence


@pytest.mark.parametrize(
    ("settings", "asked", "package", "extra"),
    [
        ({"optim": "adamw_8bit"}, "optim: adamw_8bit", "bitsandbytes", "trainer-8bit"),
        (FOUR_BITS, "load_in_4bit", "bitsandbytes", "trainer-8bit"),
        ({"use_liger_kernel": True}, "use_liger_kernel", "liger_kernel", "trainer-gpu"),
    ],
)
def test_an_option_of_a_missing_package_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], asked: str, package: str, extra: str
) -> None:
    has_all_but(monkeypatch, package)
    ((_, said),) = check_environment(run(**settings), {"CUDA_VISIBLE_DEVICES": "0"})
    assert said == f"{asked} needs {package} where the trainer runs; install with {install_extras(extra)}"


def test_options_that_run_anywhere_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has_all_but(monkeypatch)
    settings: tuple[dict[str, Any], ...] = (
        {"attn_implementation": "eager", "weight_transport": "gloo"},
        {"optim": "adamw_8bit"},
        {},
    )
    for asked in settings:
        assert check_environment(run(**asked), NO_GPU) == []


def test_a_tracker_whose_library_is_missing_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    has_all_but(monkeypatch, "wandb")
    ((field, sentence),) = check_environment(run(report_to=["tensorboard", "wandb"]), NO_GPU)
    assert field == "report_to"
    assert "wandb cannot be used" in sentence
    assert install_extras("report") in sentence
    assert check_environment(run(report_to=["tensorboard"]), NO_GPU) == []


def test_a_tracker_outside_the_extra_is_installed_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    has_all_but(monkeypatch, "mlflow")
    ((_, sentence),) = check_environment(run(report_to=["mlflow"]), NO_GPU)
    assert f"Install with {install_packages('mlflow')} there" in sentence


def test_torch_compile_needs_a_compiler_unless_its_backend_needs_none(tmp_path: Path) -> None:
    nowhere = {**NO_GPU, "PATH": str(tmp_path)}
    ((field, sentence),) = check_environment(run(torch_compile=True), nowhere)
    assert field == "torch_compile"
    assert "install g++, or set torch_compile_backend: aot_eager" in sentence
    assert check_environment(run(torch_compile=True, torch_compile_backend="aot_eager"), nowhere) == []
    assert check_environment(run(), nowhere) == []
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    assert check_environment(run(torch_compile=True), nowhere) == []
    assert check_environment(run(torch_compile=True), {**nowhere, "CXX": "no-such-compiler"})


def test_a_folder_that_a_tracker_left_behind_is_not_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("left_behind")


def test_an_object_store_is_written_read_and_left_as_it_was() -> None:
    fsspec: Any = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("memory://bucket/other", b"stays")
    assert check_weight_dir("memory://bucket/weights") == []
    assert list(memory.find("memory://bucket")) == ["/bucket/other"]


def test_a_store_whose_package_is_missing_is_named() -> None:
    pytest.importorskip("fsspec")
    assert importlib.util.find_spec("gcsfs") is None
    ((field, why),) = check_weight_dir("gs://bucket/weights")
    assert field == "weight_dir"
    assert "gcsfs" in why
    assert "every generator need the package" in why


def test_a_store_that_does_not_answer_is_refused_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    ((field, why),) = check_weight_dir("s3://bucket/weights")
    assert field == "weight_dir"
    assert "weights cannot be written to s3://bucket/weights/check-" in why
    assert "127.0.0.1:9" in why


def test_a_directory_is_looked_at_and_not_made(tmp_path: Path) -> None:
    assert check_weight_dir(str(tmp_path / "not" / "there")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_entered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_directory(monkeypatch, tmp_path)
    ((field, why),) = check_weight_dir(str(tmp_path / "weights"))
    assert field == "weight_dir"
    assert why.startswith(f"the trainer cannot write to {tmp_path}: fix its permissions")


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_weight_dir(str(tmp_path / "file" / "below")) == [
        (
            "weight_dir",
            f"the trainer cannot write to {tmp_path / 'file'}: fix its permissions, or choose another directory",
        )
    ]
