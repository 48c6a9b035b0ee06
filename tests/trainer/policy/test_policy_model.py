import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer.data.prompt_encoder import load_tokenizer
from services.trainer.policy.policy_model import load_policy, save_description, save_policy
from services.trainer.policy.trained_weights import AllWeights, LiveWeights
from services.trainer.ranks.weight_buckets import WeightBuckets
from shared.errors import UserError
from tests.trainer.cores import CPU, assert_odd_generation, copy_with_odd_generation, make_core, random_rows
from tests.trainer.tensor_files import load_file


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model for the test to damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


SAFETENSORS: Any = safetensors.torch


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_weights_have_the_names_shapes_and_bits_of_the_files_they_came_from(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    named = dict(core.named_weights())
    on_disk = load_file(tiny_model / "model.safetensors")
    assert set(named) == set(on_disk)
    assert all(torch.equal(named[name], on_disk[name]) for name in named)
    assert not any(tensor.requires_grad for tensor in named.values())
    assert [name for name, _ in core.named_weights()] == list(named)  # the order is always the same


def test_tied_weights_come_once(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    names = [name for name, _ in make_core(tmp_path).named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert set(names) == set(load_file(tmp_path / "model.safetensors"))


def test_updates_too_small_for_bfloat16_add_up(tiny_model: Path) -> None:
    # A weight of about 0.2 has neighbours 1e-3 apart in bfloat16; one step moves it by 1e-5.
    core = make_core(tiny_model, dtype="bfloat16", learning_rate=1e-5)
    before = {name: tensor.clone() for name, tensor in core.named_weights()}
    rows = random_rows(4)
    for _ in range(100):
        core.accumulate(rows)
        core.step()
    changed = sum(int((before[name] != tensor).sum()) for name, tensor in core.named_weights())
    total = sum(tensor.numel() for tensor in before.values())
    assert changed > total / 4


def test_a_missing_model_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the model '.*absent' was not found: it is not a directory") as caught:
        load_policy(str(tmp_path / "absent"), revision=None, device=CPU)
    assert caught.value.field == "model"


def test_a_model_that_comes_with_its_own_code_is_refused(broken_model: Path) -> None:
    edit_json(broken_model / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (broken_model / "evil.py").write_text("raise AssertionError('was run')")
    with pytest.raises(UserError, match=r"needs Python code from its repository .* never run"):
        load_policy(str(broken_model), revision=None, device=CPU)


def test_a_tokenizer_that_comes_with_its_own_code_is_refused(broken_model: Path) -> None:
    edit_json(broken_model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(UserError, match="needs Python code from its repository"):
        load_tokenizer(str(broken_model))


def test_a_model_whose_files_lack_a_weight_is_refused_instead_of_made_up(broken_model: Path) -> None:
    file = broken_model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    SAFETENSORS.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 of the model's parameters, such as model.layers.1.mlp.up_proj"):
        load_policy(str(broken_model), revision=None, device=CPU)


def test_a_model_with_only_pickled_weights_is_refused(broken_model: Path) -> None:
    (broken_model / "model.safetensors").unlink()
    (broken_model / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match="could not be loaded"):
        load_policy(str(broken_model), revision=None, device=CPU)


def test_a_model_whose_weight_file_is_torn_is_refused(broken_model: Path) -> None:
    file = broken_model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="could not be loaded"):
        load_policy(str(broken_model), revision=None, device=CPU)


def test_an_unknown_architecture_is_refused(broken_model: Path) -> None:
    edit_json(broken_model / "config.json", model_type="unheard_of")
    with pytest.raises(UserError, match="could not be loaded"):
        load_policy(str(broken_model), revision=None, device=CPU)


def test_a_model_whose_generation_settings_contradict_each_other_is_described_all_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_with_odd_generation(tiny_model, tmp_path / "model")
    policy = load_policy(str(model), revision=None, device=CPU)
    with pytest.raises(ValueError, match="Fix these issues to save"):
        policy.generation_config.save_pretrained(tmp_path / "refused")
    described = tmp_path / "described"
    described.mkdir()
    save_description(policy, None, described)
    assert_odd_generation(described)


def test_the_bias_of_a_router_keeps_all_its_bits_in_bfloat16(tmp_path: Path) -> None:
    config = Glm4MoeConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    lm = Glm4MoeForCausalLM(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([4.01, 4.02, 4.03, 4.04])  # all of them are 4.0 in bfloat16
    lm.get_buffer(name).copy_(bias)
    live, buckets = LiveWeights(AllWeights(lm), dtype=torch.bfloat16), WeightBuckets(lm, dtype=torch.bfloat16)
    gathered = dict(chain.from_iterable(buckets.gather(part).items() for part in range(len(buckets))))
    for pushed in (dict(live()), gathered):
        assert torch.equal(pushed[name], bias)
        assert {weight.dtype for other, weight in pushed.items() if other != name} == {torch.bfloat16}
    for described in (live.described(), buckets.described()):
        assert dict(described)[name].dtype == torch.float32
    save_policy(lm, tmp_path / "saved", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert torch.equal(loaded.get_buffer(name), bias)
