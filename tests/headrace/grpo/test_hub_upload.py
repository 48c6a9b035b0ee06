"""A script's model is uploaded by the real huggingface_hub, to a hub on this machine."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.grpo.grpo_trainer import GRPOTrainer
from headrace.grpo.hub_upload import Card, complete_card, repository_name, upload
from shared.run_options.grpo_config import GRPOConfig
from tests.trainer.export.fake_hub import TOKEN, FakeHub, fake_hub

constants = pytest.importorskip("huggingface_hub.constants")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
"""A warning that huggingface_hub itself causes."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "headrace-run.json").write_text("{}")
    return directory


def uploaded(model: Path, args: GRPOConfig, **more: Any) -> tuple[str, Any]:
    given: dict[str, Any] = {"commit_message": "End", "blocking": True, "token": None, "revision": None, "card": Card()}
    return upload(model, args, **(given | more))


def front_matter(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.decode().split("---")[1])
    return found


def test_a_model_and_its_card_are_uploaded_with_what_the_call_says(hub: FakeHub, model: Path) -> None:
    args = GRPOConfig(output_dir="out/tiny", hub_token="not this", hub_private_repo=True)
    repository, commit = uploaded(
        model, args, token=TOKEN, commit_message="Done", card=Card("Tiny", "org/data", ["math", "grpo"])
    )
    assert repository == "someone/tiny"
    assert str(commit).startswith(hub.url)
    files = hub.files["someone/tiny"]
    assert files.keys() - {".gitattributes"} == {"config.json", "model.safetensors", "README.md"}
    assert front_matter(files["README.md"]) == {
        "model_name": "Tiny",
        "library_name": "transformers",
        "tags": ["headrace", "grpo", "math"],
        "datasets": ["org/data"],
    }
    assert hub.private == {"someone/tiny"}
    assert hub.messages == ["Done"]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_push_uploads_what_is_saved_for_it_and_leaves_no_directory(
    hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, blocking: bool
) -> None:
    pytest.importorskip("transformers")

    def save_model(_script: GRPOTrainer, directory: str) -> None:
        shutil.copytree(model, directory, dirs_exist_ok=True)

    monkeypatch.setattr(GRPOTrainer, "save_model", save_model)
    args = GRPOConfig(output_dir=str(tmp_path / "out"), hub_token=TOKEN)
    script = GRPOTrainer("org/model", "length", args, [{"prompt": "a"}])
    done = script.push_to_hub(blocking=blocking)
    commit = done if blocking else done.result(timeout=120)
    assert str(commit).startswith(hub.url)
    assert {"config.json", "model.safetensors", "README.md"} <= hub.files["someone/out"].keys()
    deadline = time.monotonic() + 120
    while list((tmp_path / "out").iterdir()):  # a future's callbacks run after its result is there
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_branch_is_made_and_an_upload_in_the_background_is_a_future(hub: FakeHub, model: Path) -> None:
    args = GRPOConfig(hub_model_id="someone/named", hub_token=TOKEN, hub_revision="v1")
    hub.hold.clear()
    repository, future = uploaded(model, args, revision="v2", blocking=False)
    assert repository == "someone/named"
    assert hub.asked_to_store.wait(timeout=120)
    assert not future.done()
    hub.hold.set()
    assert str(future.result(timeout=120)).startswith(hub.url)
    assert hub.files["someone/named"] == {}
    assert "config.json" in hub.files["someone/named@v2"]


def test_the_card_of_a_training_keeps_its_text_and_its_data_sets(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("---\ntags:\n- headrace\n- lora\ndatasets:\n- org/first\n---\n# Mine\n\nWords.\n")
    complete_card(file, Card(None, ["org/second"], "math"), repository="someone/tiny")
    assert front_matter(file.read_bytes())["tags"] == ["headrace", "lora", "grpo", "math"]
    assert front_matter(file.read_bytes())["datasets"] == ["org/first", "org/second"]
    assert file.read_text().endswith("# Mine\n\nWords.\n")


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="push_to_hub needs a name: set hub_model_id, or output_dir"):
        repository_name(GRPOConfig())
    assert repository_name(GRPOConfig(output_dir="runs/mine")) == "mine"
