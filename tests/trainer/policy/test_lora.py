"""LoRA in the trainer's core: the weights that change, the saved adapter, and loading it with PEFT."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from headrace.cli.command_line import main
from services.trainer.checkpoints.checkpoint import load_into, newest_valid
from services.trainer.data.prompt_encoder import load_tokenizer
from services.trainer.policy.lora import (
    add_adapters,
    describe_adapters,
    fingerprint,
    linear_layers,
    outside_decoder,
    write_adapters,
)
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.trained_weights import AdapterWeights
from services.trainer.ranks.weight_buckets import WeightBuckets
from shared.errors import HeadraceError, UserError
from tests.checkpoints import save_checkpoint
from tests.tiny_model import make_gemma_3, make_tiny_model
from tests.trainer.cores import (
    assert_odd_generation,
    assert_same_weights,
    copy_with_odd_generation,
    make_config,
    make_core,
    make_row,
    random_rows,
    weights,
)
from tests.trainer.tensor_files import load_file

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 12, "learning_rate": 1e-2}
ROW = make_row(list(range(4, 24)), [0] + [1] * 19)


def all_tensors(core: PolicyCore) -> dict[str, Tensor]:
    """Return a copy of every parameter; base weights have their names without adapters."""
    return {name: tensor.detach().clone() for name, tensor in core.lm.named_parameters()}


def train(core: PolicyCore, num_steps: int, *, seed: int = 0, with_reference: bool = False) -> None:
    for number in range(num_steps):
        rows = random_rows(6, seed=seed + number)
        if with_reference:
            scored = zip(rows, core.score(rows), strict=True)
            rows = [replace(row, reference_logprobs=scores.reference_logprobs) for row, scores in scored]
        core.accumulate(rows)
        core.step()


def logprobs(core: PolicyCore, rows: Sequence[TrainRow]) -> list[float]:
    return joined([scores.trainer_logprobs for scores in core.score(rows)])


def joined(arrays: Sequence[Any]) -> list[float]:
    return [float(number) for number in np.concatenate(arrays)]


def logprobs_of(model: Any, row: TrainRow) -> list[float]:
    """Return the model's logprobs of all tokens of a row but the first, computed in the ordinary way."""
    ids = torch.as_tensor(row.token_ids.astype(np.int64))
    with torch.no_grad():
        all_TV: Tensor = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return [float(number) for number in all_TV.gather(1, ids[1:, None])[:, 0]]


def saved_run(run_dir: Path, model: Path, **settings: Any) -> tuple[PolicyCore, Path]:
    """Return a trained core and its checkpoint in a run's directory."""
    core = make_core(model, **LORA, **settings)
    train(core, 2)
    run_dir.mkdir()
    config = make_config(model, **LORA, **settings).model_dump(mode="json")
    (run_dir / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(model))
    return core, save_checkpoint(run_dir / "checkpoints", core, {}, step=2, keep=2, tokenizer=tokenizer)


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_a_step_moves_every_adapter_and_no_bit_of_the_base(tiny_model: Path, gradient_checkpointing: bool) -> None:
    core = make_core(tiny_model, gradient_checkpointing=gradient_checkpointing, **LORA)
    before = all_tensors(core)
    train(core, 2)  # B alone has a gradient while it is 0
    after = all_tensors(core)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(moved) == 2 * len(linear_layers(make_core(tiny_model).lm))
    base = {name.replace(".base_layer.", "."): tensor for name, tensor in after.items() if "lora_" not in name}
    original = load_file(tiny_model / "model.safetensors")
    assert base.keys() == original.keys()
    assert all(torch.equal(base[name], original[name]) for name in original)


def test_version_0_is_the_base_and_the_reference_stays_it(tiny_model: Path) -> None:
    rows = random_rows(5)
    of_base = logprobs(make_core(tiny_model), rows)
    core = make_core(tiny_model, beta=0.1, **LORA)
    assert logprobs(core, rows) == of_base
    train(core, 3, with_reference=True)
    assert max(abs(mine - base) for mine, base in zip(logprobs(core, rows), of_base, strict=True)) > 0.1
    reference = [scores.reference_logprobs for scores in core.score(rows)]
    assert joined(reference) == of_base
    assert len({id(module) for module in core.lm.modules()}) == sum(1 for _ in core.lm.modules())


def test_adapters_depend_only_on_the_seed_of_the_run(tiny_model: Path) -> None:
    torch.manual_seed(123)
    first = weights(make_core(tiny_model, seed=1, **LORA))
    torch.manual_seed(321)
    assert_same_weights(weights(make_core(tiny_model, seed=1, **LORA)), first)
    other = weights(make_core(tiny_model, seed=2, **LORA))
    assert all(not torch.equal(other[name], first[name]) for name in first if "lora_A" in name)
    assert all(not first[name].any() for name in first if "lora_B" in name)


def test_only_the_adapters_are_pushed_in_the_dtype_of_the_run(tiny_model: Path) -> None:
    core = make_core(tiny_model, dtype="bfloat16", **LORA)
    train(core, 1)
    pushed = dict(core.named_weights())
    assert {tensor.dtype for tensor in pushed.values()} == {torch.bfloat16}
    # 2 layers of 4 matrices of 64 x 64 and 3 of 64 x 128: r * (in + out) numbers of 2 bytes each.
    assert sum(tensor.nbytes for tensor in pushed.values()) == 2 * 4 * (4 * 128 + 3 * 192) * 2
    held = {name: parameter.dtype for name, parameter in core.lm.named_parameters()}
    assert {dtype for name, dtype in held.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in held.items() if "lora_" not in name} == {torch.bfloat16}


def test_a_gradient_with_frozen_weights_is_that_of_the_merged_weights_projected_on_the_adapters(
    tiny_model: Path,
) -> None:
    """With W = W0 + s B A, dL/dB = s (dL/dW) A^T and dL/dA = s B^T (dL/dW)."""
    core, whole = make_core(tiny_model, **LORA), make_core(tiny_model)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in core.lm.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    found = dict(core.lm.named_parameters())
    layers = sorted(linear_layers(whole.lm))
    with torch.no_grad():
        for layer in layers:
            a, b = (found[f"{layer}.lora_{matrix}.default.weight"] for matrix in "AB")
            whole.lm.get_submodule(layer).weight.add_(b @ a, alpha=3.0)
    rows = random_rows(6)
    for learning in (core, whole):
        learning.accumulate(rows)
    for layer in layers:
        a, b = (found[f"{layer}.lora_{matrix}.default.weight"] for matrix in "AB")
        gradient = whole.lm.get_submodule(layer).weight.grad
        torch.testing.assert_close(b.grad, 3.0 * gradient @ a.T, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(a.grad, 3.0 * b.T @ gradient, rtol=1e-3, atol=1e-5)


def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_was_not(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**LORA, "lora_dropout": 0.2, "beta": 0.05}
    core = make_core(tiny_model, **settings)
    train(core, 2, with_reference=True)
    checkpoint = save_checkpoint(tmp_path, core, {}, step=2, keep=1)
    train(core, 2, seed=50, with_reference=True)
    resumed = make_core(tiny_model, **settings)
    newest = newest_valid(tmp_path)
    assert newest is not None
    load_into(resumed, newest)
    assert resumed.policy_version == 2
    train(resumed, 2, seed=50, with_reference=True)
    assert_same_weights(weights(resumed), weights(core))
    kept = sum(path.stat().st_size for path in (checkpoint / "model").glob("*.safetensors"))
    assert kept < (tiny_model / "model.safetensors").stat().st_size / 4


def test_a_checkpoint_is_refused_when_the_base_is_not_the_one_the_run_began_with(
    tiny_model: Path, tmp_path: Path
) -> None:
    core = make_core(tiny_model, **LORA)
    train(core, 1)
    save_checkpoint(tmp_path / "checkpoints", core, {}, step=1, keep=1)
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    other = make_core(make_tiny_model(tmp_path / "other", seed=7), **LORA)
    with pytest.raises(HeadraceError, match=r"another base: the weights of .*other have changed .*, or they were"):
        load_into(other, newest)


def test_a_fingerprint_is_of_the_base_and_not_of_the_adapters(tiny_model: Path) -> None:
    core = make_core(tiny_model, **LORA)
    before = fingerprint(core.lm)
    assert before == fingerprint(make_core(tiny_model).lm)
    train(core, 1)
    assert fingerprint(core.lm) == before
    with torch.no_grad():
        core.lm.get_input_embeddings().weight[0, 0] += 1
    assert fingerprint(core.lm) != before


def test_an_exported_adapter_is_loaded_by_peft_and_says_what_the_trainer_says(tiny_model: Path, tmp_path: Path) -> None:
    core, checkpoint = saved_run(tmp_path / "run-1", tiny_model)
    out = tmp_path / "adapter"
    assert main(["export", str(checkpoint), "--to", str(out)]) == 0
    assert not (out / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(out)).eval()
    assert logprobs_of(loaded, ROW) == pytest.approx(logprobs(core, [ROW]), abs=1e-5)
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == [4, 5, 6]
    described = json.loads((out / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(tiny_model)
    assert described["target_modules"] == sorted(described["target_modules"])
    card = (out / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"vllm serve BASE --enable-lora --max-lora-rank 8 --lora-modules policy={out.name}" in card
    exported = load_file(out / "adapter_model.safetensors")
    assert_same_weights(weights(core), {name: exported[name] for name in weights(core)})
    assert exported.keys() == weights(core).keys()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_say_what_base_and_adapters_say(tiny_model: Path, tmp_path: Path, use_rslora: bool) -> None:
    core, checkpoint = saved_run(tmp_path / "run-1", tiny_model, use_rslora=use_rslora)
    scales = {layer.scaling["default"] for layer in core.lm.modules() if hasattr(layer, "lora_A")}
    assert scales == {6.0 if use_rslora else 3.0}, "12 / sqrt(4), or 12 / 4"
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert logprobs_of(merged, ROW) == pytest.approx(logprobs(core, [ROW]), abs=1e-5)
    assert logprobs_of(merged, ROW) != pytest.approx(logprobs(make_core(tiny_model), [ROW]), abs=0.1)
    assert "library_name: transformers" in (tmp_path / "merged" / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("abc")["input_ids"] == [4, 5, 6]


def test_a_base_whose_generation_settings_contradict_each_other_is_merged_all_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    core, checkpoint = saved_run(tmp_path / "run-1", copy_with_odd_generation(tiny_model, tmp_path / "model"))
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert_odd_generation(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert logprobs_of(merged, ROW) == pytest.approx(logprobs(core, [ROW]), abs=1e-5)


def test_adapters_that_cannot_be_merged_are_refused_with_the_reason(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint = saved_run(tmp_path / "run-1", tiny_model)
    config_file = tmp_path / "run-1" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"load_in_4bit": True}))
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "merged"), "--merge"]) != 0
    assert "a base in 4 bits" in capsys.readouterr().err
    config_file.write_text('{"load_in_4b')
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "merged"), "--merge"]) != 0
    assert "config.json is damaged" in capsys.readouterr().err
    plain = save_checkpoint(tmp_path / "whole", make_core(tiny_model), {}, step=1, keep=1)
    assert main(["export", str(plain), "--to", str(tmp_path / "merged"), "--merge"]) != 0
    assert "no adapters to merge" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_adapters_are_not_merged_into_a_base_that_has_changed_since(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    _, checkpoint = saved_run(tmp_path / "run-1", base, dtype="bfloat16")
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint, moved)
    assert main(["export", str(moved), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    lm: Any = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        lm.get_input_embeddings().weight[0, 0] += 1
    lm.save_pretrained(base)
    for exported in (checkpoint, moved):
        assert main(["export", str(exported), "--to", str(tmp_path / "other"), "--merge"]) != 0
        assert "base does not have the weights that the adapters were trained with" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "adapters")]) == 0


def test_dropout_is_in_passes_that_learn_and_nowhere_else(tiny_model: Path) -> None:
    rows = random_rows(4)

    def while_learning(core: PolicyCore) -> list[float]:
        arrays = core.accumulate(rows, per_token=True).per_token
        return joined([arrays[index].trainer_logprobs for index in range(len(rows))])

    without, dropping = (make_core(tiny_model, lora_dropout=share, **LORA) for share in (0.0, 0.5))
    for core in (without, dropping):
        with torch.no_grad():
            for name, parameter in core.lm.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
    assert logprobs(dropping, rows) == logprobs(without, rows)
    assert while_learning(without) == pytest.approx(logprobs(without, rows), abs=1e-5)
    noise = np.abs(np.array(while_learning(dropping)) - logprobs(without, rows))
    assert np.median(noise) > 1e-3
    assert logprobs(dropping, rows) == logprobs(without, rows)


def test_only_the_layers_that_are_named_get_adapters(tiny_model: Path) -> None:
    pushed = weights(make_core(tiny_model, lora_target_modules=["q_proj", "layers.1.mlp.up_proj"], **LORA))
    layers = {name.removeprefix("base_model.model.model.layers.").split(".lora_")[0] for name in pushed}
    assert layers == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


def test_target_modules_that_match_nothing_are_refused_with_the_names_there_are(tiny_model: Path) -> None:
    with pytest.raises(
        UserError, match="named query or self_attn; its layers are down_proj, gate_proj, k_proj"
    ) as caught:
        make_core(tiny_model, lora_target_modules=["q_proj", "query", "self_attn"], **LORA)
    assert caught.value.field == "lora_target_modules"


def test_a_base_in_4_bits_is_refused_without_a_gpu(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="load_in_4bit needs a GPU, and the trainer has none") as caught:
        make_core(tiny_model, load_in_4bit=True, dtype="bfloat16", **LORA)
    assert caught.value.field == "load_in_4bit"


def test_adapters_of_the_text_part_of_a_checkpoint_are_pushed_with_the_prefix_of_the_whole(tmp_path: Path) -> None:
    """Transformers loads the text part of Qwen3.5, whose layers have a prefix in the files, and in vLLM's model."""
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    whole.save_pretrained(tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    add_adapters(lm, make_config(tmp_path, **LORA))
    adapters = AdapterWeights(lm, base={}, model="")
    in_files, pushed = set(adapters.live()), set(adapters.pushed())
    assert in_files
    assert all(name.startswith("base_model.model.model.layers.") for name in in_files)
    assert pushed == {name.replace("model.layers.", "model.language_model.layers.") for name in in_files}
    buckets = WeightBuckets(lm, dtype=torch.float32)
    assert set(chain.from_iterable(buckets.gather(part) for part in range(len(buckets)))) == pushed
    assert {name for name, _ in buckets.described()} == pushed


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("targets", [None, ["q_proj", "o_proj"]])
def test_a_vision_tower_whose_layers_have_the_same_names_gets_no_adapters(
    targets: list[str] | None, tmp_path: Path
) -> None:
    make_gemma_3(tmp_path / "base")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert any(".vision_tower." in name and name.endswith(".q_proj.weight") for name, _ in lm.named_parameters())
    add_adapters(lm, make_config(tmp_path / "base", **LORA, lora_target_modules=targets))
    adapters = AdapterWeights(lm, base={}, model="")
    assert len(adapters.live()) == 2 * 2 * len(targets or LAYERS)
    assert all(".language_model." in name for name in [*adapters.live(), *adapters.pushed()])

    write_adapters(adapters.live(), tmp_path)
    describe_adapters(lm, None, tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path)
    assert {name for name, _ in loaded.named_parameters() if "lora_" in name} == {
        name.replace(".weight", ".default.weight") for name in adapters.live()
    }


def test_a_model_whose_head_is_called_decoder_gets_adapters_in_its_layers() -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    lm = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes, num_attention_heads=2, pad_token_id=0))
    assert outside_decoder(lm) is None
    assert {name.rpartition(".")[2] for name in linear_layers(lm)} >= {"q_proj", "k_proj", "v_proj", "Wo"}
