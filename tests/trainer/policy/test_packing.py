"""Packed rows in one sequence, against the same rows in one pass each, for several kinds of model."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor

from services.trainer.policy import varlen_attention
from services.trainer.policy.linear_logprobs import HeadTransform
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.varlen_attention import PACKED, NotPackableError, equal_runs, packed_attention
from shared.errors import UserError
from tests.tiny_model import VOCAB_SIZE
from tests.trainer.cores import GRADIENT_DESCENT, make_core, random_rows

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
WITHOUT_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
WINDOW = 4
MODELS: dict[str, Callable[[], Any]] = {
    "qwen2 with tied embeddings": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True)
    ),
    "qwen2 with a sliding window in one layer": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "gemma2 with capped scores and logits": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SHAPE, sliding_window=WINDOW, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
        )
    ),
    "gpt-oss with attention sinks and experts": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SHAPE,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
}


def save(model: Any, directory: Path) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
    model.save_pretrained(directory)
    return directory


@pytest.fixture(params=list(MODELS))
def model_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(MODELS[request.param](), tmp_path / "model")


def gradients(core: PolicyCore) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone() for name, parameter in core.lm.named_parameters() if parameter.grad is not None
    }


def by_the_model(directory: Path, token_ids: list[int]) -> Tensor:
    """Return log p of each token but the first, computed by transformers with its simplest attention."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor(token_ids)
    logits_TV: Tensor = model(ids[None]).logits[0, :-1]
    return logits_TV.double().log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach()


def test_packed_or_not_in_any_order_and_under_any_budget_the_loss_and_its_gradient_are_the_same(
    model_directory: Path,
) -> None:
    rows = random_rows(9)
    assert max(row.token_ids.size for row in rows) > WINDOW + 3
    seen: list[tuple[int, float, dict[str, Tensor]]] = []
    arrangements: list[tuple[Any, dict[str, Any]]] = [
        (rows, {}),
        (rows, {"packing": False}),
        (rows[::-1], {}),
        (rows, {"max_tokens_per_microbatch": 30, "max_completion_length": 30}),
    ]
    # The load-balancing loss of experts is computed per pass, so it is the only loss that differs (algorithms.md).
    plain: dict[str, Any] = {"entropy_coef": 0.1, "router_aux_loss_coef": 0.0, **GRADIENT_DESCENT}
    for order, settings in arrangements:
        core = make_core(model_directory, **plain, **settings)
        stats = core.accumulate(order)
        seen.append((stats.num_passes, stats.token_stats.loss, gradients(core)))
    assert [num_passes for num_passes, _, _ in seen] == [1, 9, 1, seen[3][0]]
    assert 3 <= seen[3][0] < 9
    for _, loss, theirs in seen[1:]:
        assert loss == pytest.approx(seen[0][1], rel=1e-5)
        assert set(theirs) == set(seen[0][2])
        scale = max(float(gradient.abs().max()) for gradient in theirs.values())
        for name, gradient in theirs.items():
            torch.testing.assert_close(gradient, seen[0][2][name], rtol=1e-4, atol=1e-6 * scale)


def test_packed_logprobs_equal_the_models_own(model_directory: Path) -> None:
    rows = random_rows(4)
    scores = make_core(model_directory).score(rows)
    for row, score in zip(rows, scores, strict=True):
        expected = by_the_model(model_directory, row.token_ids.tolist())[torch.tensor(row.loss_mask[1:]) == 1]
        torch.testing.assert_close(torch.tensor(score.trainer_logprobs).double(), expected, rtol=1e-4, atol=2e-5)


def test_a_model_that_runs_across_rows_is_found_out_and_trained_one_row_a_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4)
    directory = save(transformers.MambaForCausalLM(config), tmp_path)
    with caplog.at_level(logging.WARNING, logger="services.trainer.policy.packing_check"):
        core = make_core(directory)
    assert not core.packs
    assert "MambaForCausalLM is trained with one rollout per pass, without packing: its logprobs" in caplog.text
    rows = random_rows(3)
    assert core.accumulate(rows).num_passes == 3
    expected = by_the_model(directory, rows[1].token_ids.tolist())[torch.tensor(rows[1].loss_mask[1:]) == 1]
    scored = torch.tensor(core.score(rows)[1].trainer_logprobs).double()
    torch.testing.assert_close(scored, expected, rtol=1e-4, atol=2e-5)


def test_a_window_far_longer_than_the_test_rows_is_tested_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.MistralConfig(**SHAPE, sliding_window=4096)
    directory = save(transformers.MistralForCausalLM(config), tmp_path)
    core = make_core(directory)
    assert core.packs
    assert core.lm.config.sliding_window == 4096

    def without_window(*args: Any, **kwargs: Any) -> Any:
        return packed_attention(*args, **{**kwargs, "sliding_window": None})

    monkeypatch.setitem(cast(Any, transformers.AttentionInterface)._global_mapping, PACKED, without_window)
    monkeypatch.setattr("services.trainer.policy.model_options.register", lambda: None)
    assert not make_core(directory).packs
    assert "without packing: its logprobs differ by" in caplog.text


def test_unknown_changes_of_logits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.GraniteConfig(**WITHOUT_HEAD_DIM, logits_scaling=3.0)
    directory = save(transformers.GraniteForCausalLM(config), tmp_path)
    make_core(directory)

    def knows_nothing(config: Any, *, temperature: float) -> HeadTransform:
        return HeadTransform(temperature=temperature)

    monkeypatch.setattr(HeadTransform, "of_model", knows_nothing)
    with pytest.raises(UserError, match="GraniteForCausalLM changes its logits in an unknown way"):
        make_core(directory)


def test_weights_that_are_not_finite_are_refused_at_the_start(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(UserError, match=r"the weights of .* give logprobs that are NaN or infinite"):
        make_core(save(model, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_q": None}, "boundaries of rows"),
        ({"position_bias": torch.zeros(1)}, "its attention uses position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_attention_that_would_be_left_out_is_refused(change: dict[str, Any], message: str) -> None:
    query = torch.zeros(1, 2, 4, 8)
    arguments = {"cu_seq_lens_q": torch.tensor([0, 4]), "dropout": 0.0, "scaling": 1.0} | change
    with pytest.raises(NotPackableError, match=message):
        packed_attention(object(), query, query, query, None, **arguments)


@pytest.mark.parametrize(("size", "is_fused"), [(256, True), (512, False)])
def test_heads_that_are_too_large_for_the_fused_kernel_are_computed_row_by_row(
    size: int, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu:
        """Boundaries as they are on a GPU."""

        is_cuda = True

        def tolist(self) -> list[int]:
            return [0, 4, 7]

    fused: list[int] = []

    def flash(query_1HND: Tensor, *_: object) -> Tensor:
        fused.append(query_1HND.shape[-1])
        return query_1HND[0].transpose(0, 1)

    monkeypatch.setattr(varlen_attention, "_flash", flash)
    query = torch.randn(1, 2, 7, size)
    output, _ = packed_attention(object(), query, query, query, None, cu_seq_lens_q=OnGpu(), max_length_q=4)
    assert output.shape == (1, 7, 2, size)
    assert fused == ([size] if is_fused else [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_implementation": "flex_attention"}, "flex_attention needs a GPU"),
        ({"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}, "flash_attention_2 needs a GPU"),
        ({"use_liger_kernel": True}, "use_liger_kernel needs a GPU"),
    ],
)
def test_options_that_this_device_does_not_support_are_refused_with_a_sentence(
    tiny_model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_core(tiny_model, **settings)


def test_attention_of_transformers_takes_packed_rows_too(tiny_model: Path) -> None:
    rows = random_rows(5)
    ours, theirs = make_core(tiny_model), make_core(tiny_model, attn_implementation="eager")
    assert theirs.packs
    for left, right in zip(ours.score(rows), theirs.score(rows), strict=True):
        torch.testing.assert_close(
            torch.tensor(left.trainer_logprobs), torch.tensor(right.trainer_logprobs), rtol=1e-4, atol=1e-5
        )


def test_neighbours_of_equal_length_share_a_call_within_the_memory_for_their_scores() -> None:
    lengths = [9, 9, 9, 4, 4, 9, 1]
    assert equal_runs(lengths, max_scores=10**6) == [(3, 9), (2, 4), (1, 9), (1, 1)]
    assert equal_runs(lengths, max_scores=2 * 81) == [(2, 9), (1, 9), (2, 4), (1, 9), (1, 1)]
    assert equal_runs([0, 0], max_scores=0) == [(1, 0), (1, 0)]
    assert equal_runs(lengths, max_scores=0) == [(1, length) for length in lengths]


@pytest.mark.parametrize("max_scores", [200, 2**20])
def test_the_gradient_is_the_same_however_many_rows_share_a_call(
    model_directory: Path, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in random_rows(6, seed=3) for _ in range(4)]
    gradients: list[list[Tensor]] = []
    for most in (0, max_scores):
        monkeypatch.setattr(varlen_attention, "_MAX_SCORES", most)
        core = make_core(model_directory)
        core.accumulate(rows)
        gradients.append([parameter.grad for parameter in core.lm.parameters() if parameter.grad is not None])
    assert gradients[0]
    for alone, together in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
