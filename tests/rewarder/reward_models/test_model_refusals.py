"""An invalid reward model is refused with a message that says what to do, at a check and as the outcome of a call."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.rewarder.reward_failure import RewardFailure
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_models import RewardModels
from shared.user_code.worker_frames import Refused
from tests.kept_ports import kept_port
from tests.rewarder.reward_models.conftest import call_for, rewrite_json, serving
from tests.rewarder.reward_models.fake_hub import serving_hub
from tests.tiny_model import make_tiny_model
from tests.tiny_reward_model import make_tiny_reward_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models() -> AsyncIterator[RewardModels]:
    async with serving(ModelSettings(device="cpu", check_timeout_s=100.0)) as models:
        yield models


async def refusal(models: RewardModels, name: str) -> str:
    """Return the message of a check, after comparing it with that of a call."""
    inspected = await models.inspect(name)
    assert isinstance(inspected, Refused), inspected
    with pytest.raises(RewardFailure) as caught:
        await models.call(name, call_for(("a", "b")), timeout_s=60, lane="a")
    assert (caught.value.outcome, caught.value.detail) == ("error", inspected.detail)
    return inspected.detail


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def with_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def with_code(model: Path) -> None:
    rewrite_json(model / "config.json", auto_map={"AutoModelForSequenceClassification": "code.Model"})


def with_code_in_its_tokenizer(model: Path) -> None:
    rewrite_json(model / "tokenizer_config.json", nested=[{"auto_map": "code.Tokenizer"}])


def with_three_labels(model: Path) -> None:
    rewrite_json(model / "config.json", id2label={"0": "a", "1": "b", "2": "c"})


def as_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")


def with_torn_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')


def of_no_type(model: Path) -> None:
    rewrite_json(model / "config.json", model_type=None)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_config, "has no config.json, so it is not a transformers model"),
        (without_weights, "has no *.safetensors, and headrace reads no other weights"),
        (
            with_pickled_weights,
            "are in pytorch_model.bin, which is pickle and may run code; headrace reads safetensors",
        ),
        (without_tokenizer, "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json); save it beside the model"),
        (with_code, "has auto_map: the model would run Python code from its own directory, which headrace refuses"),
        (with_code_in_its_tokenizer, "tokenizer_config.json of"),
        (with_three_labels, "gives 3 numbers for a text (num_labels in its config.json), and a reward is one"),
        (as_adapter, "is an adapter (adapter_config.json); merge it into its base model and save that"),
        (with_torn_config, "cannot be read: Expecting value: line 1 column 16"),
        (of_no_type, "has no model_type, so it is not a transformers model"),
    ],
)
async def test_files_that_will_not_do_are_refused(
    models: RewardModels, reward_model: Path, tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(reward_model, directory)
    spoil(directory)
    assert says in await refusal(models, str(directory))


async def test_a_language_model_is_not_a_reward_model(models: RewardModels, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "policy")
    said = await refusal(models, str(directory))
    assert "is not a reward model: its weights do not have score.weight, so they would be random" in said


async def test_a_head_for_two_labels_is_refused_also_where_the_config_does_not_say_so(
    models: RewardModels, tmp_path: Path
) -> None:
    directory = make_tiny_reward_model(tmp_path / "two", num_labels=2)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    assert "num_labels" not in config
    assert "id2label" not in config
    assert "gives 2 numbers for a text (score.weight), and a reward is one" in await refusal(models, str(directory))


async def test_a_name_that_can_be_no_model_says_what_a_name_looks_like(models: RewardModels) -> None:
    assert "there is no directory /tmp/no/such/model" in await refusal(models, "/tmp/no/such/model")
    assert "is neither a directory nor a Hugging Face id" in await refusal(models, "a/b/c")
    assert "is neither a directory nor a Hugging Face id" in await refusal(models, "org/../../etc")
    assert "is a URL" in await refusal(models, "http://127.0.0.1/score")


async def test_a_hub_that_cannot_be_reached_is_a_sentence(
    models: RewardModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = await refusal(models, "org/offline")
    assert said.startswith("org/offline is not in the rewarder's cache of Hugging Face, and the hub cannot be reached")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{kept_port()}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    said = await refusal(models, "org/unreachable@v1")
    assert said.startswith("org/unreachable ")
    assert "cannot be" in said


async def test_an_adapter_on_the_hub_is_refused_before_its_weights_are_fetched(
    models: RewardModels, reward_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_hub = tmp_path / "on the hub"
    shutil.copytree(reward_model, on_hub)
    as_adapter(on_hub)
    with serving_hub(on_hub) as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert "org/name is an adapter (adapter_config.json); merge it" in await refusal(models, "org/name")
    assert not [path for path in hub.asked if path.endswith(".safetensors")]


async def test_a_check_right_after_a_refusal_looks_again(models: RewardModels, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        said = [await models.inspect(str(tmp_path / name)) for _ in range(3)]
        assert all(isinstance(what, Refused) and "has no model_type" in what.detail for what in said), said
