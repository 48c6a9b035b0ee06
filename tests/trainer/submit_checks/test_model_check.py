"""A model that cannot be trained is refused at submit, with the reason."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.trainer.submit_checks.model_check import check_model, is_hub_id
from services.trainer.supervision.rank_command import ranks_per_node
from shared.errors import UnavailableError, UserError
from shared.run_options.run_config import RunConfig
from tests.trainer.beginning.made_checkpoints import write_tensors

pytestmark = pytest.mark.unit


def config(model: str | Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": str(model),
        "dataset_name": "d",
        "reward_funcs": ["r"],
        "max_completion_length": 8,
    }
    return RunConfig.model_validate(values | changes)


def nobody(_name: str, _revision: str | None) -> Mapping[str, Any]:
    raise AssertionError("a local model must not be looked up on the hub")


def refusal(run: RunConfig, lookup: Any = nobody) -> UserError:
    with pytest.raises(UserError) as caught:
        check_model(run, lookup=lookup)
    return caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory that looks like a transformers model."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {}}')
    write_tensors(tmp_path / "model.safetensors", ["w"])
    return tmp_path


def test_a_local_model_is_accepted_without_asking_the_hub(model: Path) -> None:
    assert check_model(config(model), lookup=nobody) == []


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "no .safetensors weights"),
    ],
)
def test_a_missing_file_is_named(model: Path, missing: str, sentence: str) -> None:
    (model / missing).unlink()
    error = refusal(config(model))
    assert error.field == "model"
    assert sentence in str(error)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_that_brings_code_is_refused(model: Path, name: str) -> None:
    (model / name).write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Model"}}))
    assert "auto_map" in str(refusal(config(model)))
    assert "never run" in str(refusal(config(model)))


@pytest.mark.parametrize("text", ["{", "{}", "[]", "[" * 100_000, "\0"])
def test_a_broken_config_is_a_sentence(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in str(refusal(config(model)))


def test_a_revision_of_a_directory_makes_no_sense(model: Path) -> None:
    assert refusal(config(model, model_revision="main")).field == "model_revision"


def test_prompt_and_completion_must_fit_the_model(model: Path) -> None:
    assert check_model(config(model, max_completion_length=60, max_prompt_length=4), lookup=nobody) == []
    error = refusal(config(model, max_completion_length=60, max_prompt_length=5))
    assert "65 tokens together, more than the 64 positions of the model" in str(error)
    assert "at most 59" in str(error)


@pytest.mark.parametrize(
    ("table", "vllm", "limit"),
    [
        ({"text_config": {"max_position_embeddings": 64}}, {}, "64 positions of the model"),
        ({"max_position_embeddings": 512}, {"max_model_len": 64}, "64 positions of vllm.max_model_len"),
        ({"max_position_embeddings": 16, "rope_scaling": {"type": "linear", "factor": 4.0}}, {}, "64 positions of the"),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}}, {}, "64 positions of the"),
        ({"max_position_embeddings": 64}, {"max_model_len": -1}, "64 positions of the model"),
    ],
)
def test_the_positions_are_those_that_vllm_will_have(
    model: Path, table: dict[str, Any], vllm: dict[str, Any], limit: str
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", **table}))
    settings = {"max_completion_length": 60, "vllm": vllm}
    assert check_model(config(model, **settings, max_prompt_length=4), lookup=nobody) == []
    assert limit in str(refusal(config(model, **settings, max_prompt_length=5)))


def test_a_hub_model_is_asked_for_with_its_revision() -> None:
    asked: list[tuple[str, str | None]] = []

    def lookup(name: str, revision: str | None) -> Mapping[str, Any]:
        asked.append((name, revision))
        return {"model_type": "qwen3"}

    assert check_model(config("Qwen/Qwen3-0.6B", model_revision="abc"), lookup=lookup) == []
    assert asked == [("Qwen/Qwen3-0.6B", "abc")]


def test_a_hub_model_that_brings_code_is_refused() -> None:
    def lookup(_name: str, _revision: str | None) -> Mapping[str, Any]:
        return {"auto_map": {"AutoModel": "x.Y"}}

    error = refusal(config("org/model"), lookup)
    assert "org/model on the hub has auto_map" in str(error)


def test_a_hub_that_does_not_answer_is_a_warning_and_no_refusal() -> None:
    def lookup(_name: str, _revision: str | None) -> Mapping[str, Any]:
        raise UnavailableError("the hub did not answer")

    expected = "the model was not checked: org/model is treated as a hub id, but the hub did not answer"
    assert check_model(config("org/model"), lookup=lookup) == [expected]
    (warning,) = check_model(config("nomodel"), lookup=lookup)
    assert warning.startswith("the model was not checked: there is no directory nomodel at the trainer, and nomodel is")


@pytest.mark.parametrize("path", ["./model", "../model", "a/b/c", "~/model", "C:\\model", "org/..", "", "a b", "a\n"])
def test_a_model_that_is_neither_path_nor_hub_id_is_refused(path: str) -> None:
    assert "absolute path" in str(refusal(config(path)))


@pytest.mark.parametrize(("name", "is_id"), [("gpt2", True), ("Qwen/Qwen3-0.6B", True), ("/x", False), ("a//b", False)])
def test_hub_ids_are_distinguished_from_paths(name: str, is_id: bool) -> None:
    assert is_hub_id(name) is is_id


def write_header(file: Path, tensors: Mapping[str, list[int]]) -> None:
    """Write the header of a safetensors file, without the tensors."""
    about = {"dtype": "F32", "data_offsets": [0, 0]}
    header = json.dumps({name: about | {"shape": shape} for name, shape in tensors.items()}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def test_target_modules_are_looked_for_in_the_headers_of_the_weight_files(model: Path) -> None:
    write_header(
        model / "model.safetensors",
        {
            "model.embed_tokens.weight": [64, 8],
            "model.layers.0.self_attn.q_proj.weight": [8, 8],
            "model.layers.0.self_attn.q_proj.bias": [8],
            "model.layers.0.mlp.experts.0.up_proj.weight": [16, 8],
            "model.norm.weight": [8],
            "lm_head.weight": [64, 8],
        },
    )
    write_header(model / "more.safetensors", {"model.layers.1.self_attn.k_proj.weight": [8, 8]})
    found = config(model, use_peft=True, lora_target_modules=["q_proj", "layers.1.self_attn.k_proj"])
    assert check_model(found, lookup=nobody) == []
    error = refusal(config(model, use_peft=True, lora_target_modules=["q_proj", "up_proj", "proj"]))
    assert error.field == "lora_target_modules"
    assert "no linear layer of this model is named up_proj or proj; its layers are k_proj, q_proj." in str(error)


@pytest.mark.parametrize("content", [b"", b"\x10", struct.pack("<Q", 2**40), struct.pack("<Q", 4) + b"[1]]"])
def test_a_damaged_weight_file_is_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    for run in (config(model), config(model, use_peft=True, lora_target_modules=["anything"])):
        assert f"{model / 'model.safetensors'} is damaged" in str(refusal(run))
        assert "copy it again" in str(refusal(run))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "is damaged: it has no added_tokens and no model; copy it again"),
        ('{"added_tokens": []', "cannot be read as a JSON object; copy it again"),
        ("[]", "cannot be read as a JSON object; copy it again"),
    ],
)
def test_a_damaged_tokenizer_is_named(model: Path, text: str, sentence: str) -> None:
    (model / "tokenizer.json").write_text(text)
    assert f"{model / 'tokenizer.json'} {sentence}" in str(refusal(config(model)))


def test_a_base_in_4_bits_has_one_training_rank(model: Path) -> None:
    run = config(model, use_peft=True, load_in_4bit=True, dtype="bfloat16")
    assert ranks_per_node(run, {"CUDA_VISIBLE_DEVICES": "0,1"}) == 1
    assert ranks_per_node(config(model), {"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
