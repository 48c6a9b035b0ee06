"""A script's model and tokenizer are loaded as its options say."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.grpo_trainer import GRPOTrainer
from headrace.grpo.input_delivery import SharedFiles
from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_inputs import RunInputs, UnwrittenInputs
from headrace.grpo.run_of_script import settings_with_weights
from headrace.grpo.script import Files, Script
from shared.errors import HeadraceError
from shared.run_options.grpo_config import GRPOConfig

transformers: Any = pytest.importorskip("transformers")
huggingface_hub: Any = pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.unit


class Tokenizer:
    """Stands for a tokenizer."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}", encoding="utf-8")

    def get_vocab(self) -> dict[str, int]:
        return {str(id(self)): 0}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of what is loaded from the hub."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def tokenizer(name: str, **arguments: Any) -> Tokenizer:
        asked.append((name, arguments))
        return Tokenizer()

    def download(name: str, **arguments: Any) -> str:
        asked.append((name, arguments))
        return str(tmp_path)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_the_tokenizer_is_of_the_models_revision(loaded: list[tuple[str, dict[str, Any]]]) -> None:
    args = GRPOConfig(model_init_kwargs='{"revision": "v2", "dtype": "bfloat16"}', trust_remote_code=True)
    script = GRPOTrainer("org/model", len, args, [{"prompt": "a"}])
    assert isinstance(script.processing_class, Tokenizer)
    left = {"padding_side": "left", "truncation_side": "left"}
    assert loaded == [("org/model", {**left, "revision": "v2", "trust_remote_code": True})]


def test_an_adapter_without_targets_is_on_the_layers_that_a_run_trains(tmp_path: Path, model: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2)
    live = LiveModel(str(model), None, peft_config=config, init_kwargs={})
    adapted = [name for name, _ in live.model.named_parameters() if "lora_A" in name]
    assert {name.split(".lora_A")[0].rpartition(".")[2] for name in adapted} >= {"q_proj", "up_proj", "down_proj"}
    assert config.target_modules is None, "the script's own object is left as it is"
    live.peft_config.target_modules = ["q_proj"]
    other = LiveModel(live.name, None, peft_config=live.peft_config, init_kwargs={})
    live.save(tmp_path / "adapter")
    other.take(tmp_path / "adapter", checkpoint="run-0")
    with pytest.raises(HeadraceError, match="has weights that the model has no place for, such as"):
        _ = other.model


@pytest.mark.parametrize("targets", [None, ["q_proj"]])
def test_an_adapter_is_not_on_a_vision_tower(targets: list[str] | None, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    from tests.tiny_model import make_gemma_3

    make_gemma_3(tmp_path)
    live = LiveModel(str(tmp_path), None, peft_config=peft.LoraConfig(r=2, target_modules=targets), init_kwargs={})
    adapted = [name for name, _ in live.model.named_parameters() if "lora_A" in name]
    assert adapted
    assert all(".language_model." in name for name in adapted)


def test_a_model_with_several_adapters_is_refused() -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(_name_or_path="org/model"), save_pretrained=None)
    model.get_base_model, model.peft_config = None, {"default": object(), "other": object()}
    with pytest.raises(ValueError, match=r"has the adapters default, other, .*: delete the others \(model\.delete"):
        LiveModel(model, None, peft_config=None, init_kwargs={})


def test_another_tokenizer_is_written_beside_the_weights_of_the_revision(
    loaded: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    live = LiveModel("org/model", Tokenizer(), peft_config=None, init_kwargs={"revision": "v2"})
    inputs = RunInputs(tmp_path / "inputs", SharedFiles(tmp_path / "functions"))
    assert (Path(live.given_for_run(lambda: inputs)) / "tokenizer.json").exists()
    assert loaded == [("org/model", {"revision": "v2"})] * 2


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token_as_in_trl() -> None:
    given: Any = SimpleNamespace(pad_token=None, eos_token="<end>")
    assert LiveModel("org/model", given, peft_config=None, init_kwargs={}).tokenizer.pad_token == "<end>"
    given = SimpleNamespace(pad_token="<pad>", eos_token="<end>")
    assert LiveModel("org/model", given, peft_config=None, init_kwargs={}).tokenizer.pad_token == "<pad>"


def quantized(**bits: bool) -> Any:
    config = SimpleNamespace(_name_or_path="org/model", quantization_config=SimpleNamespace(**bits))
    return SimpleNamespace(config=config, save_pretrained=None)


def test_a_model_object_in_4_bits_is_loaded_by_its_name_in_4_bits() -> None:
    live = LiveModel(quantized(load_in_4bit=True), None, peft_config=None, init_kwargs={})
    rows = [{"prompt": "a"}]
    script = Script(live, ["length"], GRPOConfig(), train_dataset=rows, reward_processing_classes=[None])
    settings, _ = settings_with_weights(
        script, Files(UnwrittenInputs), lambda inputs: script.model.weights_for_run(inputs), callbacks=(), source=None
    )
    assert (settings["model"], settings["load_in_4bit"]) == ("org/model", True)


def test_a_model_object_that_is_quantized_in_another_way_is_refused() -> None:
    script = GRPOTrainer(quantized(load_in_8bit=True), len, GRPOConfig(), [{"prompt": "a"}])
    with pytest.raises(ArgumentError, match="only 4 bits are supported"):
        script.train()


def test_what_a_script_has_changed_after_the_training_is_saved(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("torch")
    live = LiveModel(str(model), None, peft_config=None, init_kwargs={})
    shutil.copytree(model, tmp_path / "trained")
    live.save_changes(tmp_path / "trained")
    live.model.generation_config.eos_token_id = 7
    live.tokenizer.model_max_length = 99
    live.save_changes(tmp_path / "trained")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "trained").eos_token_id == 7
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "trained").model_max_length == 99
