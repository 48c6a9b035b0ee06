"""The core against a second implementation without packing, passes and float32."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.model_options import activation_bytes
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.rank_plan import Slot
from services.trainer.policy.ranks import Floats, SingleRank
from tests.trainer.cores import (
    GRADIENT_DESCENT,
    assert_same_weights,
    make_config,
    make_core,
    make_row,
    per_token_advantages,
    random_rows,
    weights,
)

TEMPERATURE = 0.7


def reference_logprobs(model: Path, row: TrainRow) -> tuple[torch.nn.Module, Tensor]:
    """Return the model in float64, and log p of the row's sampled tokens under it, with gradient."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    return policy, reference_row_logprobs(policy, row)


def reference_row_logprobs(policy: torch.nn.Module, row: TrainRow) -> Tensor:
    ids = torch.tensor(row.token_ids.tolist())
    logits: Tensor = policy(ids.unsqueeze(0)).logits[0, :-1]
    logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.tensor(row.loss_mask[1:].tolist()) == 1]


def reference_gradients(model: Path, rows: list[TrainRow], *, cap: float) -> tuple[dict[str, Tensor], float]:
    """Return the gradient by weight, and the loss: the mean over all tokens of -advantage * weight * logprob."""
    policy, _ = reference_logprobs(model, rows[0])
    num_tokens = sum(row.num_sampled for row in rows)
    value = 0.0
    for row in rows:
        logprobs = reference_row_logprobs(policy, row)
        generator = torch.tensor(row.generator_logprobs.tolist(), dtype=torch.float64)
        weight = torch.exp(logprobs.detach() - generator).clamp(max=cap)
        weight *= torch.tensor(row.advantages.tolist(), dtype=torch.float64)
        value += float(-weight.sum()) / num_tokens
        surrogate = -(weight * logprobs).sum() / num_tokens
        surrogate.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}, value


def totals_of(rows: list[TrainRow]) -> StepTotals:
    num_tokens = sum(row.num_sampled for row in rows)
    return StepTotals(num_rollouts=len(rows), num_tokens=num_tokens, num_step_tokens=num_tokens)


@pytest.mark.parametrize("is_per_token", [False, True])
def test_loss_and_gradient_conform_to_a_reference_without_packing(tiny_model: Path, is_per_token: bool) -> None:
    rows = random_rows(12)
    if is_per_token:  # every second row has an advantage for each token, and is packed with the others
        rows[::2] = [replace(row, advantage=per_token_advantages(row)) for row in rows[::2]]
    core = make_core(
        tiny_model, temperature=TEMPERATURE, vllm_importance_sampling_mode="token_truncate", **GRADIENT_DESCENT
    )
    before = weights(core)
    core.accumulate(rows)
    stats = core.step()
    after = weights(core)
    expected, loss = reference_gradients(tiny_model, rows, cap=3.0)
    assert set(expected) == set(before)
    for name, gradient in expected.items():
        torch.testing.assert_close((before[name] - after[name]).double(), gradient, rtol=2e-4, atol=2e-7)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    assert stats.metrics()["loss"] == pytest.approx(loss, rel=1e-4)
    assert stats.token_stats.num_tokens == sum(row.num_sampled for row in rows)
    assert stats.metrics()["sampling/truncated_share"] > 0  # the gradient norm was above the cap


def test_many_passes_over_several_calls_are_one_big_batch(tiny_model: Path) -> None:
    rows = random_rows(20)
    whole = make_core(tiny_model, **GRADIENT_DESCENT)
    stats = whole.accumulate(rows)
    assert (stats.num_passes, stats.num_rows) == (1, 20)
    assert stats.num_pass_tokens == sum(row.token_ids.size for row in rows)
    pieces = make_core(tiny_model, max_tokens_per_microbatch=32, max_completion_length=8, **GRADIENT_DESCENT)
    assert pieces.accumulate(rows[:7], totals=totals_of(rows)).num_passes > 2
    pieces.accumulate(rows[7:][::-1], totals=totals_of(rows))
    whole_stats, pieces_stats = whole.step(), pieces.step()
    assert pieces_stats.metrics() == pytest.approx(whole_stats.metrics(), rel=1e-4, abs=1e-7)
    left, right = weights(whole), weights(pieces)
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=5e-7)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "sapo", "cispo"])
def test_a_fork_that_changed_nothing_is_trained_as_if_it_were_none(tiny_model: Path, loss_type: str) -> None:
    """The second row repeats the first one's tokens as its context, so the logprobs are the same."""
    other = make_row([4, 9, 10, 11], [0, 1, 1, 1], advantage=-0.7)
    whole = make_row([5, 6, 7, 8, 9, 12], [0, 1, 0, 1, 1, 1], advantage=0.4)
    cut = [
        replace(make_row([5, 6], [0, 1], advantage=0.4), share=0.25),
        replace(make_row([5, 6, 7, 8, 9, 12], [0, 0, 0, 1, 1, 1], advantage=0.4), share=0.75),
    ]
    found: list[tuple[dict[str, Any], float]] = []
    settings = {"loss_type": loss_type} | ({"epsilon_high": 1.5} if loss_type == "cispo" else {}) | GRADIENT_DESCENT
    for rows in ([other, whole], [other, *cut]):
        core = make_core(
            tiny_model, max_completion_length=8, vllm_importance_sampling_mode="token_truncate", **settings
        )
        before = weights(core)
        core.accumulate(rows)
        loss = core.step().metrics()["loss"]
        found.append(({name: before[name] - tensor for name, tensor in weights(core).items()}, loss))
    (one, loss_of_one), (two, loss_of_two) = found
    assert loss_of_two == pytest.approx(loss_of_one, rel=1e-5)
    assert max(float(step.abs().max()) for step in one.values()) > 1e-3
    for name, step in one.items():
        torch.testing.assert_close(two[name], step, rtol=1e-4, atol=1e-6)


def test_per_token_arrays_come_in_the_order_of_the_rows(tiny_model: Path) -> None:
    rows = random_rows(9)
    core = make_core(tiny_model, temperature=TEMPERATURE, max_tokens_per_microbatch=32, max_completion_length=8)
    per_token = core.accumulate(rows, per_token=True).per_token
    assert set(per_token) == set(range(9))
    policy, _ = reference_logprobs(tiny_model, rows[0])
    for index, row in enumerate(rows):
        arrays = per_token[index]
        expected = reference_row_logprobs(policy, row).detach().numpy()
        np.testing.assert_allclose(arrays.trainer_logprobs, expected, atol=2e-5)
        np.testing.assert_allclose(arrays.importance_ratio, np.exp(expected - row.generator_logprobs), rtol=1e-4)
        assert arrays.entropy.shape == expected.shape
        assert (arrays.entropy > 0).all()
        assert arrays.advantage == row.advantage


def test_dropout_is_off_so_that_the_ratio_measures_no_noise(tiny_model: Path, tmp_path: Path) -> None:
    config = Qwen3Config.from_pretrained(tiny_model, attention_dropout=0.5)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    core = make_core(tmp_path)
    row = make_row([5, 6, 7, 8, 9], [0, 1, 1, 1, 1])
    first, second = (core.accumulate([row], per_token=True).per_token for _ in range(2))
    assert first[0].trainer_logprobs.tolist() == second[0].trainer_logprobs.tolist()


def test_per_token_arrays_are_made_of_the_rows_asked_for(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    assert core.accumulate(random_rows(2)).per_token == {}
    assert set(core.accumulate(random_rows(5), per_token=[1, 4]).per_token) == {1, 4}


def test_rows_of_advantage_zero_count_as_tokens_and_move_nothing_else(tiny_model: Path) -> None:
    row = make_row([5, 6, 7, 8], [0, 0, 1, 1])
    idle = make_row([9, 10, 11, 12], [0, 0, 1, 1], advantage=0.0)
    alone, accompanied = make_core(tiny_model, **GRADIENT_DESCENT), make_core(tiny_model, **GRADIENT_DESCENT)
    alone.accumulate([row])
    accompanied.accumulate([idle, row])
    stats = alone.step(), accompanied.step()
    assert stats[1].token_stats.num_tokens == 4
    assert stats[1].grad_norm == pytest.approx(stats[0].grad_norm / 2, rel=1e-5)


def test_a_step_on_only_rows_of_advantage_zero_leaves_the_weights(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    before = weights(core)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1], advantage=0.0)])
    stats = core.step()
    assert (stats.policy_version, stats.grad_norm) == (1, 0.0)
    assert_same_weights(weights(core), before)


def test_training_makes_a_rewarded_completion_likelier_and_a_punished_one_less_likely(tiny_model: Path) -> None:
    core = make_core(tiny_model, learning_rate=1e-3)
    rows = [
        make_row([5, 6, 7, 8], [0, 0, 1, 1], advantage=1.0),
        make_row([5, 6, 9, 10], [0, 0, 1, 1], advantage=-1.0),
    ]

    def logprobs() -> list[float]:
        return [float(scores.trainer_logprobs.sum()) for scores in core.score(rows)]

    before = logprobs()
    for _ in range(5):
        core.accumulate(rows)
        core.step()
    after = logprobs()
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


def test_without_importance_correction_the_clip_holds_on_to_the_generator(tiny_model: Path) -> None:
    # Much more likely now than when it was sampled, and good: the clip stops it. The truncated weight would not.
    row = make_row([5, 6, 7], [0, 1, 1], advantage=1.0, generator_logprob=-50.0)
    clipped = make_core(tiny_model, vllm_importance_sampling_correction=False, use_decoupled_loss=False)
    clipped.accumulate([row])
    stats = clipped.step()
    assert stats.grad_norm == 0.0
    assert stats.metrics()["clip_ratio/high_mean"] == 1.0
    corrected = make_core(tiny_model, vllm_importance_sampling_mode="token_truncate")
    corrected.accumulate([row])
    stats = corrected.step()
    assert stats.grad_norm > 0
    assert stats.metrics()["clip_ratio/high_mean"] == 0.0
    assert stats.metrics()["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_step_and_leaves_the_weights(tiny_model: Path, advantage: float) -> None:
    core = make_core(tiny_model)
    before = weights(core)
    good = make_row([5, 6, 7], [0, 1, 1])
    core.accumulate([good])
    with pytest.raises(NonFiniteError, match="the loss of step 1 is") as caught:
        core.accumulate([good, good, make_row([5, 6, 7], [0, 1, 1], advantage=advantage)])
    assert caught.value.row_indices == (2,)
    assert_same_weights(weights(core), before)
    assert core.policy_version == 0
    # The previously accumulated gradients are discarded too, and the core goes on.
    with pytest.raises(ValueError, match="nothing was accumulated"):
        core.step()
    core.accumulate([good])
    assert core.step().policy_version == 1


def test_a_gradient_that_is_not_finite_names_the_step_and_leaves_the_weights(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1])])
    core.step()
    before = weights(core)
    # The loss is finite, but the squares in the gradient's norm are not.
    core.accumulate([make_row([5, 6], [0, 1], advantage=1e30, generator_logprob=-4.0)])
    with pytest.raises(NonFiniteError, match="the gradient of step 2 has norm inf"):
        core.step()
    assert_same_weights(weights(core), before)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1])])
    assert core.step().policy_version == 2


def test_the_norm_of_the_gradients_can_be_asked_for_without_a_step(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    before = weights(core)
    core.accumulate(random_rows(3))
    norm = core.grad_norm()
    assert core.grad_norm() == norm > 0
    assert_same_weights(weights(core), before)
    assert core.step().grad_norm == norm


def test_a_step_of_nothing_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="nothing was accumulated"):
        make_core(tiny_model).step()


def test_scores_equal_the_reference_implementation(tiny_model: Path) -> None:
    rows = random_rows(6)
    core = make_core(tiny_model, temperature=TEMPERATURE, max_tokens_per_microbatch=32, max_completion_length=8)
    policy, _ = reference_logprobs(tiny_model, rows[0])
    for row, scores in zip(rows, core.score(rows), strict=True):
        expected = reference_row_logprobs(policy, row).detach().numpy()
        np.testing.assert_allclose(scores.trainer_logprobs, expected, atol=2e-5)
        assert scores.entropies.shape == expected.shape
        assert scores.reference_logprobs is None


def test_scoring_leaves_no_gradient_behind(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.score(random_rows(3))
    assert all(parameter.grad is None for parameter in core.lm.parameters())


def test_the_reference_stays_where_the_policy_began(tiny_model: Path) -> None:
    rows = random_rows(4)
    core = make_core(tiny_model, beta=0.1, learning_rate=1e-2)
    before = core.score(rows)
    rows = [
        replace(row, reference_logprobs=scores.reference_logprobs) for row, scores in zip(rows, before, strict=True)
    ]
    core.accumulate(rows)
    assert core.step().metrics()["kl"] == pytest.approx(0.0, abs=1e-6)
    core.accumulate(rows)
    assert core.step().metrics()["kl"] > 1e-3
    after = core.score(rows)
    for first, second in zip(before, after, strict=True):
        assert first.reference_logprobs is not None
        assert second.reference_logprobs is not None
        assert first.reference_logprobs.tolist() == second.reference_logprobs.tolist()
        assert first.reference_logprobs.tolist() == first.trainer_logprobs.tolist()
        assert not np.allclose(second.trainer_logprobs, first.trainer_logprobs, atol=1e-3)


def test_a_kl_term_without_reference_logprobs_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="needs reference_logprobs"):
        make_core(tiny_model, beta=0.1).accumulate(random_rows(2))


def test_a_reference_that_follows_moves_by_its_share_in_its_own_time(tiny_model: Path) -> None:
    core = make_core(
        tiny_model,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.25,
        learning_rate=1e-2,
    )
    reference = cast(Any, core)._reference

    def reference_weights() -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in reference.module.lm.named_parameters()}

    start = reference_weights()
    for num_steps in (1, 2):
        rows = random_rows(2, seed=num_steps)
        scored = zip(rows, core.score(rows), strict=True)
        core.accumulate([replace(row, reference_logprobs=scores.reference_logprobs) for row, scores in scored])
        core.step()
        expected = start
        if num_steps == 2:
            expected = {name: 0.75 * start[name] + 0.25 * weight for name, weight in core.lm.named_parameters()}
        for name, weight in reference_weights().items():
            torch.testing.assert_close(weight, expected[name])


def test_old_logprobs_hold_the_clip_where_the_batch_began(tiny_model: Path) -> None:
    row = make_row([5, 6, 7], [0, 1, 1], advantage=1.0, generator_logprob=-4.0)
    core = make_core(tiny_model, vllm_importance_sampling_correction=False)
    (scores,) = core.score([row])
    core.accumulate([replace(row, old_logprobs=scores.trainer_logprobs)])
    assert core.step().grad_norm > 0  # ratio 1: nothing is clipped, whatever the generator's logprobs are
    core = make_core(tiny_model, vllm_importance_sampling_correction=False)
    core.accumulate([replace(row, old_logprobs=scores.trainer_logprobs - 1.0)])
    stats = core.step()
    assert (stats.grad_norm, stats.metrics()["clip_ratio/high_mean"]) == (0.0, 1.0)  # ratio e, above 1.2


def test_only_tokens_of_high_entropy_over_the_whole_step_teach(tiny_model: Path) -> None:
    rows = [make_row([5, 6, 7, 8], [0, 1, 1, 1]), make_row([9, 10, 11], [0, 1, 1], advantage=-1.0)]
    settings: Any = {"vllm_importance_sampling_correction": False, "loss_type": "dr_grpo", "max_completion_length": 1}
    core = make_core(tiny_model, top_entropy_quantile=0.4, **settings)
    entropies = [scores.entropies for scores in core.score(rows)]
    threshold = np.quantile(np.concatenate(entropies), 0.6)  # 2 of 5 tokens stay
    kept = [int((array >= threshold).sum()) for array in entropies]
    assert sum(kept) == 2
    stats = core.accumulate(rows)
    # Ratios are 1: the loss is the sum of minus the advantages of the tokens that stay, over 2 rows and 1 token.
    assert stats.token_stats.loss == pytest.approx(-(kept[0] * 1.0 + kept[1] * -1.0) / 2)
    assert stats.token_stats.num_tokens == 5


def test_the_entropy_bonus_pulls_towards_more_entropy(tiny_model: Path) -> None:
    row = make_row([5, 6, 7, 8], [0, 1, 1, 1], advantage=0.0)
    core = make_core(tiny_model, entropy_coef=1.0, learning_rate=1e-3)
    before = float(core.score([row])[0].entropies.mean())
    for _ in range(3):
        core.accumulate([row])
        assert core.step().metrics()["entropy_coef"] == 1.0
    assert float(core.score([row])[0].entropies.mean()) > before + 0.01


def test_recomputed_activations_change_no_bit_and_are_fewer(tiny_model: Path) -> None:
    rows = random_rows(8)
    seen: dict[bool, tuple[int, list[Tensor]]] = {}
    for recomputes in (True, False):
        core = make_core(tiny_model, gradient_checkpointing=recomputes)
        num_bytes = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal num_bytes
            num_bytes += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            core.accumulate(rows)
        seen[recomputes] = num_bytes, [parameter.grad for parameter in core.lm.parameters()]
    assert all(torch.equal(*pair) for pair in zip(seen[True][1], seen[False][1], strict=True))
    assert seen[True][0] < seen[False][0] / 2


def test_activations_are_kept_where_they_are_known_to_be_small(tiny_model: Path) -> None:
    rows = random_rows(64)
    num_tokens = sum(row.token_ids.size for row in rows)
    settings: dict[str, Any] = {"max_completion_length": 8, "max_prompt_length": 8}
    config = make_config(tiny_model, max_tokens_per_microbatch=num_tokens, **settings)
    seen: list[int] = []
    for max_tokens in (num_tokens, 10**9):
        core = make_core(tiny_model, max_tokens_per_microbatch=max_tokens, **settings)
        sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in core.lm.parameters()}
        held: list[Tensor] = []  # so that no address is used twice

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes, held: list[Tensor] = held) -> Tensor:
            held.append(tensor)
            sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            core.accumulate(rows)
        seen.append(sum(sizes.values()))
    kept, recomputed = seen
    assert recomputed < kept / 2
    expected = activation_bytes(core.lm, config)
    assert expected / 1.5 < kept < expected * 1.5


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma2Config(attn_logit_softcapping=50.0),  # keeps its scores
        transformers.MambaConfig(),  # has no heads
        transformers.Gemma3nTextConfig(),  # has a size for each layer
    ],
    ids=lambda config: type(config).__name__,
)
def test_activations_of_unknown_size_are_recomputed(config: Any, tiny_model: Path) -> None:
    lm = SimpleNamespace(config=config, named_parameters=list)
    assert activation_bytes(lm, make_config(tiny_model)) == math.inf


def test_bfloat16_is_close_to_float32_and_keeps_float32_weights(tiny_model: Path) -> None:
    rows = random_rows(4)
    exact, rounded = make_core(tiny_model), make_core(tiny_model, dtype="bfloat16")
    head_exact = make_core(tiny_model, dtype="bfloat16", cast_lm_head_to_fp32=True)
    assert {parameter.dtype for parameter in rounded.lm.parameters()} == {torch.float32}

    def errors(core: PolicyCore) -> float:
        pairs = zip(core.score(rows), exact.score(rows), strict=True)
        return float(max(np.abs(left.trainer_logprobs - right.trainer_logprobs).max() for left, right in pairs))

    assert 1e-4 < errors(rounded) < 0.2
    assert errors(head_exact) < errors(rounded)


def test_the_same_rows_in_the_same_order_give_the_same_bits(tiny_model: Path) -> None:
    runs: list[dict[str, Tensor]] = []
    for _ in range(2):
        core = make_core(tiny_model, learning_rate=1e-3)
        for seed in range(3):
            core.accumulate(random_rows(6, seed=seed))
            core.step()
        runs.append(weights(core))
    assert_same_weights(*runs)


class EqualRanks(SingleRank):
    """Two ranks with the same rows."""

    def gather(self, array: Floats) -> list[Floats]:
        return [array, array]


def test_passes_and_their_tokens_are_counted_on_all_ranks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(3)
    core = make_core(tiny_model)
    monkeypatch.setattr(core, "_ranks", EqualRanks())
    stats = core.accumulate(rows, plan=[Slot((index,), needs_backward=True) for index in range(3)])
    assert (stats.num_passes, stats.num_pass_tokens) == (6, 2 * sum(row.token_ids.size for row in rows))


def test_a_pass_without_rows_takes_part_and_changes_nothing(tiny_model: Path) -> None:
    rows = random_rows(3)
    plain, accompanied = make_core(tiny_model), make_core(tiny_model)
    whole = Slot(tuple(range(3)), needs_backward=True)
    plain.accumulate(rows, plan=[whole])
    stats = accompanied.accumulate(rows, plan=[whole, Slot((), needs_backward=True), Slot((), needs_backward=False)])
    assert (stats.num_passes, stats.num_pass_tokens) == (3, sum(row.token_ids.size for row in rows))
    for left, right in zip(plain.lm.parameters(), accompanied.lm.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_a_probe_is_scored_at_temperature_1_whatever_the_run_samples_at(tiny_model: Path) -> None:
    token_ids = [1, 7, 30, 12, 5, 9]
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    logits: Tensor = policy(torch.tensor([token_ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]
    core = make_core(tiny_model, temperature=TEMPERATURE)
    np.testing.assert_allclose(core.probe(token_ids), expected.detach().numpy(), atol=1e-5)
    row = make_row(token_ids, [0, 1, 1, 1, 1, 1])
    scaled = reference_row_logprobs(policy, row).detach().numpy()
    np.testing.assert_allclose(core.score([row])[0].trainer_logprobs, scaled, atol=1e-5)
