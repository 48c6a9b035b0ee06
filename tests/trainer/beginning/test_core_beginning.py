"""What a core takes over from a checkpoint, to the last bit, and at which learning rate it goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer.policy.lora import write_adapters
from services.trainer.policy.policy_core import PolicyCore
from shared.errors import HeadraceError
from tests.checkpoints import save_checkpoint
from tests.tiny_model import VOCAB_SIZE
from tests.trainer.cores import assert_same_weights, make_core, random_rows, weights
from tests.trainer.tensor_files import load_file

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}


def adam(model: Path, *, total_steps: int = 6, **settings: Any) -> PolicyCore:
    chosen = {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "weight_decay": 0.1} | settings
    return make_core(model, total_steps=total_steps, **chosen)


def train(core: PolicyCore, steps: range) -> list[float]:
    """Make steps, and return their learning rates."""
    rates: list[float] = []
    for step in steps:
        core.accumulate(random_rows(4, seed=step))
        rates.append(core.step().learning_rate)
    return rates


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights and moments."""
    return {
        f"{path.relative_to(checkpoint)}:{name}": tensor
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def in_bfloat16(core: PolicyCore) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in weights(core).items()}


def saved(core: PolicyCore, root: Path) -> Path:
    return save_checkpoint(root, core, {}, step=core.policy_version, keep=9)


@pytest.mark.parametrize("lora", [{}, LORA])
def test_a_run_that_continues_has_weights_and_optimizer_to_the_last_bit_and_its_own_count(
    tiny_model: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    source = adam(tiny_model, **lora)
    train(source, range(4))
    checkpoint = saved(source, tmp_path / "source")
    forked = adam(tiny_model, total_steps=2, **lora)
    forked.begin_from(checkpoint)
    assert forked.policy_version == 0
    assert_same_weights(weights(forked), weights(source))
    before, after = tensors(checkpoint), tensors(saved(forked, tmp_path / "forked"))
    assert before.keys() == after.keys()
    assert any(name.startswith("optimizer/") for name in before)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_checkpoint_of_fewer_parameter_groups_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    """A later release may divide the parameters into more groups. All have the same learning rate."""
    source = adam(tiny_model)
    train(source, range(2))
    checkpoint = saved(source, tmp_path / "source")
    file = checkpoint / "core_state.json"
    state: dict[str, Any] = json.loads(file.read_text())
    assert len(state["schedule"]["base_lrs"]) == len(state["schedule"]["_last_lr"]) > 1
    for name in ("base_lrs", "_last_lr"):
        state["schedule"][name].pop()
    file.write_text(json.dumps(state))
    resumed = adam(tiny_model)
    resumed.load_state(checkpoint)
    assert train(resumed, range(2, 4)) == train(source, range(2, 4))
    assert_same_weights(weights(resumed), weights(source))


def test_steps_go_on_as_if_the_source_had_made_them(tiny_model: Path, tmp_path: Path) -> None:
    """Four steps and a run of two more are six steps: rates fall by a sixth each."""
    straight = adam(tiny_model)
    rates = train(straight, range(6))
    assert rates == pytest.approx([1e-3 * left / 6 for left in (6, 5, 4, 3, 2, 1)])
    source = adam(tiny_model)
    train(source, range(4))
    forked = adam(tiny_model, total_steps=2)
    forked.begin_from(saved(source, tmp_path))
    assert train(forked, range(4, 6)) == rates[4:]
    assert forked.policy_version == 2
    assert_same_weights(weights(forked), weights(straight))


def test_a_fork_that_crashes_and_one_that_is_forked_again_keep_their_place_in_the_schedule(
    tiny_model: Path, tmp_path: Path
) -> None:
    source = adam(tiny_model)
    rates = train(source, range(2))
    forked = adam(tiny_model, total_steps=4)
    forked.begin_from(saved(source, tmp_path / "source"))
    rates += train(forked, range(2, 4))
    checkpoint = saved(forked, tmp_path / "forked")
    assert checkpoint.name == "step_00000002"
    resumed = adam(tiny_model, total_steps=4)
    resumed.load_state(checkpoint)
    assert resumed.policy_version == 2
    again = adam(tiny_model, total_steps=2)
    again.begin_from(checkpoint)
    assert again.policy_version == 0
    rest = train(forked, range(4, 6))
    assert train(resumed, range(4, 6)) == train(again, range(4, 6)) == rest
    assert rates + rest == pytest.approx([1e-3 * left / 6 for left in (6, 5, 4, 3, 2, 1)])


def test_a_changed_learning_rate_and_length_hold_from_the_first_step(tiny_model: Path, tmp_path: Path) -> None:
    source = adam(tiny_model)
    train(source, range(4))
    forked = adam(tiny_model, total_steps=4, learning_rate=2e-3)
    forked.begin_from(saved(source, tmp_path))
    assert train(forked, range(4)) == pytest.approx([2e-3 * left / 8 for left in (4, 3, 2, 1)])


def test_a_reference_that_follows_moves_at_the_same_steps_as_in_one_run(tiny_model: Path, tmp_path: Path) -> None:
    """In runs of 3 steps, every fourth is the first one of the second run, and the second one of the third run."""
    follows: dict[str, Any] = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4}
    straight, split = (adam(tiny_model, total_steps=9, **follows) for _ in range(2))
    for step in range(9):
        if step in (3, 6):
            checkpoint = saved(split, tmp_path / f"run ended at {step}")
            split = adam(tiny_model, total_steps=9 - step, **follows)
            split.begin_from(checkpoint)
        if step == 5:
            checkpoint = saved(split, tmp_path / "run that crashed")
            split = adam(tiny_model, total_steps=6, **follows)
            split.load_state(checkpoint)
        for core in (straight, split):
            rows = random_rows(4, seed=step)
            scored = zip(rows, core.score(rows), strict=True)
            core.accumulate([replace(row, reference_logprobs=scores.reference_logprobs) for row, scores in scored])
            core.step()
        assert_same_weights(reference_weights(split), reference_weights(straight))
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    assert any(not torch.equal(weight, start[name]) for name, weight in reference_weights(straight).items())


def reference_weights(core: PolicyCore) -> dict[str, torch.Tensor]:
    return dict(cast("Any", core)._reference.module.lm.named_parameters())


def test_with_only_the_weights_the_optimizer_and_the_schedule_are_fresh(tiny_model: Path, tmp_path: Path) -> None:
    source = adam(tiny_model)
    train(source, range(4))
    checkpoint = saved(source, tmp_path / "source")
    forked = adam(tiny_model)
    forked.take_weights(checkpoint / "model")
    assert_same_weights(weights(forked), weights(source))
    state = json.loads((saved(forked, tmp_path / "forked") / "core_state.json").read_text())
    assert (state["policy_version"], state["schedule"]["last_epoch"], state["adam_steps"]) == (0, 0, {})
    assert train(forked, range(1)) == [1e-3]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_directory_of_transformers_gives_its_weights(tmp_path: Path, tiny_model: Path, is_tied: bool) -> None:
    config = Qwen3Config.from_pretrained(tiny_model, tie_word_embeddings=is_tied)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for seed, path in enumerate((theirs, ours)):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
        model.to(torch.bfloat16 if path == theirs else torch.float32).save_pretrained(path)
    core = adam(ours)
    core.take_weights(theirs)
    expected = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32).state_dict()
    found = weights(core)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_an_adapter_of_peft_gives_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    source = adam(tiny_model, **LORA)
    train(source, range(2))
    write_adapters(weights(source), tmp_path)
    core = adam(tiny_model, **LORA)
    core.take_weights(tmp_path)
    assert_same_weights(weights(core), weights(source))


@pytest.mark.parametrize(("theirs", "ours"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_adapters_go_on_in_another_dtype(tiny_model: Path, tmp_path: Path, theirs: str, ours: str) -> None:
    source = adam(tiny_model, dtype=theirs, **LORA)
    train(source, range(2))
    checkpoint = saved(source, tmp_path)
    everything, only_weights = (adam(tiny_model, dtype=ours, **LORA) for _ in range(2))
    everything.begin_from(checkpoint)
    only_weights.take_weights(checkpoint / "model")
    for core in (everything, only_weights):
        assert_same_weights(in_bfloat16(core), in_bfloat16(source))


def test_a_checkpoint_with_only_the_hash_of_an_older_release_is_compared_with_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    checkpoint = saved(adam(tiny_model, **LORA), tmp_path)
    state = json.loads((checkpoint / "core_state.json").read_text())
    del state["base_in_bfloat16"]
    (checkpoint / "core_state.json").write_text(json.dumps(state))
    adam(tiny_model, **LORA).begin_from(checkpoint)
    (checkpoint / "core_state.json").write_text(json.dumps(state | {"base": state["base"] + 1}))
    with pytest.raises(HeadraceError, match="adapters of another base"):
        adam(tiny_model, **LORA).begin_from(checkpoint)


def test_weights_of_another_model_are_refused_with_the_name_of_a_weight(tiny_model: Path, tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(tiny_model, vocab_size=VOCAB_SIZE + 1)).save_pretrained(tmp_path)
    with pytest.raises(HeadraceError, match=r"belong to another model: .* has shape \(\d+, 64\) in the checkpoint"):
        adam(tiny_model).take_weights(tmp_path)
    with pytest.raises(HeadraceError, match=r"belong to another model: .* is not in the checkpoint"):
        adam(tiny_model, **LORA).take_weights(tmp_path)
