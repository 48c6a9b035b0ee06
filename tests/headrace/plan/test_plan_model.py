"""The model facts in `headrace plan`: counts equal the real libraries' counts, and the places of a config."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.asking import MAX_BYTES
from headrace.plan import model_source
from headrace.plan.model_shape import model_shape
from headrace.plan.model_source import read_shape
from shared.errors import UserError
from tests.headrace.doctor.doctor_rig import dripping_port
from tests.headrace.plan.plan_rig import TINY
from tests.headrace.scripted_api import Answer, serving

pytestmark = pytest.mark.unit

FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "tie_word_embeddings": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "tie_word_embeddings": True},
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    {"model_type": "mixtral", "num_local_experts": 4},
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: "-".join(map(str, family.values())))
def test_parameters_are_counted_as_transformers_builds_them(family: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config: Any = transformers.AutoConfig.for_model(**(TINY | family))
    with torch.device("meta"):
        lm: Any = transformers.AutoModelForCausalLM.from_config(config)
    shape = model_shape(TINY | family, where="config.json")
    assert shape.num_parameters == sum(parameter.numel() for parameter in lm.parameters())
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in lm.model.layers]
    assert shape.num_layer_parameters == max(layers)


def test_adapters_are_counted_as_peft_makes_them() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        lm: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**TINY, model_type="qwen3")
        )
        wrapped: Any = peft.get_peft_model(lm, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    made = sum(parameter.numel() for name, parameter in wrapped.named_parameters() if "lora_" in name)
    linear = model_shape({**TINY, "model_type": "qwen3"}, where="config.json").num_linear_inputs_and_outputs
    assert linear is not None
    assert 8 * linear == made


def test_weights_of_an_unknown_architecture_are_counted_in_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "novel"}))
    with pytest.raises(UserError, match="give a directory with its weight files, or --parameters"):
        read_shape(str(tmp_path))
    assert read_shape(str(tmp_path), num_parameters=8e9).num_parameters == 8_000_000_000
    tensors = {"a": {"dtype": "F32", "shape": [3, 5]}, "b": {"dtype": "F32", "shape": [7]}, "__metadata__": {}}
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_shape(str(tmp_path)).num_parameters == 22
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match="cannot be counted"):
        read_shape(str(tmp_path))


def test_a_model_may_be_named_by_its_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY, "model_type": "qwen3"}))
    assert read_shape(str(file)) == read_shape(str(tmp_path))


def test_a_file_that_is_not_a_config_is_refused_without_being_read(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\xff" * 20)
    with pytest.raises(UserError) as refusal:
        read_shape(str(weights))
    assert str(refusal.value) == f"{weights} is not a config.json; give its directory, or the config.json there"


def test_key_value_heads_are_shared_evenly_or_copied_evenly() -> None:
    """Of 28 query heads, 7 GPUs get 4 each; but 4 key-value heads cannot be copied evenly to 7 GPUs."""
    shape = model_shape(
        {**TINY, "model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4}, where="config.json"
    )
    assert [size for size in range(1, 30) if shape.splits_over(size)] == [1, 2, 4, 28]


def test_layers_without_attention_have_no_kv_cache() -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    shape = model_shape({**TINY, "model_type": "hybrid", "layer_types": kinds}, where="config.json")
    assert shape.kv_numbers_per_token() == 2 * 1 * 2 * 16


def test_a_gpu_keeps_its_share_of_the_heads_in_its_share_of_the_layers() -> None:
    """Two key-value heads of size 16 in three layers; each GPU has at least one head of a layer."""
    shape = model_shape({**TINY, "model_type": "qwen3"}, where="config.json")
    assert shape.kv_numbers_per_token() == 2 * 3 * 2 * 16
    assert shape.kv_numbers_per_token(tensor_parallel=2, pipeline_parallel=3) == 2 * 1 * 1 * 16
    assert shape.kv_numbers_per_token(tensor_parallel=4, pipeline_parallel=2) == 2 * 2 * 1 * 16


def test_a_config_of_the_hub_is_fetched_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(lambda _: {**TINY, "model_type": "qwen3"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert read_shape("org/name").num_layers == 3
        assert hub.asked[0].path == "/org/name/resolve/main/config.json"
    with serving(lambda _: Answer(404)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(UserError, match="answers 404"):
            read_shape("org/name")


def test_a_config_that_the_hub_has_moved_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    body = json.dumps({**TINY, "model_type": "qwen3"}).encode()
    with serving(lambda _: Answer(body=body)) as storage:
        moved = Answer(307, location=f"{storage.url}/config.json")
        with serving(lambda _: moved) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            assert read_shape("org/name").num_layers == 3
        assert hub.asked[0].headers["authorization"] == "Bearer hf_secret"
        assert "authorization" not in storage.asked[0].headers, "the token is not sent to another machine"


def test_a_hub_that_drips_is_given_up_and_an_answer_without_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_TIMEOUT_S", 1.0)
    with dripping_port() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(UserError, match="did not answer within 1 s; give the directory"):
            read_shape("org/name")
    monkeypatch.setattr(model_source, "_TIMEOUT_S", 60.0)
    with serving(lambda _: Answer(body=b" " * MAX_BYTES + b"{}")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(UserError, match="not a JSON object of at most 4 MiB"):
            read_shape("org/name")
