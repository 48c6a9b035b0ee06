"""An optimizer step's use of its gradient: schedule, clipping, weight decay."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from services.trainer.policy.optimizers.optimizer import decays, make_optimizer, make_scheduler
from shared.run_options.optimizers import FACTS, Optimizer
from shared.run_options.run_config import RunConfig
from tests.tiny_model import make_gemma_3
from tests.trainer.cores import GRADIENT_DESCENT, make_config, make_core, make_row, weights


def test_the_learning_rate_warms_up_and_decays(tiny_model: Path) -> None:
    core = make_core(tiny_model, total_steps=6, learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=2)
    rates: list[float] = []
    for _ in range(6):
        core.accumulate([make_row([5, 6, 7], [0, 1, 1])])
        rates.append(core.step().learning_rate)
    assert rates == pytest.approx([0.0, 0.5e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_a_change_of_the_runs_length_moves_the_learning_rate_to_the_schedule_of_the_new_length(
    tiny_model: Path,
) -> None:
    core = make_core(tiny_model, total_steps=4, learning_rate=1e-3, lr_scheduler_type="linear")
    rates: list[float] = []
    for total_steps in (4, 4, 8, 8, None):
        core.accumulate([make_row([5, 6, 7], [0, 1, 1])])
        rates.append(core.step(total_steps).learning_rate)
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.75e-3, 0.625e-3, 0.5e-3])


def test_the_gradient_is_clipped_to_its_norm_and_reported_before_clipping(tiny_model: Path) -> None:
    core = make_core(tiny_model, max_grad_norm=0.25, **GRADIENT_DESCENT)
    before = weights(core)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1], advantage=1000.0)])
    stats = core.step()
    after = weights(core)
    moved = math.sqrt(sum(float((before[name] - after[name]).square().sum()) for name in before))
    assert stats.grad_norm > 1.0
    assert moved == pytest.approx(0.25, rel=1e-3)


def test_weight_decay_spares_norms(tiny_model: Path) -> None:
    core = make_core(tiny_model, learning_rate=0.1, weight_decay=0.5)
    before = weights(core)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1], advantage=0.0)])
    core.step()
    for name, tensor in weights(core).items():
        factor = 1.0 if "norm" in name else 1 - 0.1 * 0.5
        torch.testing.assert_close(tensor, before[name] * factor)


def test_weight_decay_spares_layer_norms_of_any_name(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=64, tie_word_embeddings=True)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    core = make_core(tmp_path, learning_rate=0.1, weight_decay=0.5)
    before = weights(core)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1], advantage=0.0)])
    core.step()
    after = weights(core)
    assert after["transformer.h.0.ln_1.weight"].equal(before["transformer.h.0.ln_1.weight"])
    assert not after["transformer.h.0.mlp.c_fc.weight"].equal(before["transformer.h.0.mlp.c_fc.weight"])


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon", "adafactor", "sgd"])
def test_no_optimizer_changes_a_vision_tower_beside_text(optim: str, tmp_path: Path) -> None:
    make_gemma_3(tmp_path)
    core = make_core(tmp_path, optim=optim, learning_rate=0.1, weight_decay=0.5)
    before = weights(core)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1])])
    core.step()
    after = weights(core)
    unchanged = {name for name in before if after[name].equal(before[name])}
    assert "vision_tower.encoder.layers.0.self_attn.q_proj.weight" in unchanged
    assert unchanged == {name for name in before if not name.startswith("language_model.")}


@pytest.mark.parametrize(
    ("optim", "moved"),
    [
        ("adamw_torch_fused", [0.5, -0.5]),  # the sign of the gradient times the learning rate
        ("adamw_torch", [0.5, -0.5]),
        ("adagrad", [0.5, -0.5]),
        ("rmsprop", [5.0, -5.0]),  # the first second moment is 0.01 times the square
        ("sgd", [1.0, -2.0]),
        ("adafactor", [0.5, -0.5]),  # of a vector, it keeps a second moment like Adam's
        ("muon", [0.5, -0.5]),  # of a vector, it is AdamW
    ],
)
def test_the_first_step_of_each_optimizer(optim: str, moved: list[float]) -> None:
    config = RunConfig.model_validate(
        {"model": "m", "dataset_name": "d", "reward_funcs": ["a"], "optim": optim, "learning_rate": 0.5}
    )
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer({"w": weight}, config)
    weight.grad = torch.tensor([2.0, -4.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -torch.tensor(moved))


@pytest.mark.parametrize(
    ("optim", "optim_args", "num_bytes"),
    [
        ("adamw_torch_fused", None, 8),
        ("muon", None, 4),
        ("adagrad", None, 4),
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 4),
        ("rmsprop", None, 4),
        ("rmsprop", "momentum=0.9,centered=true", 12),
        ("adafactor", None, 0),  # and a number for each row and each column
        ("adamw_8bit", None, 2),
        ("paged_adamw_32bit", None, 8),
        ("lion_8bit", None, 1),
        ("ademamix", None, 12),
        ("rmsprop_bnb_8bit", None, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_an_optimizer_keeps_the_bytes_that_the_plan_counts_on(
    optim: Optimizer, optim_args: str | None, num_bytes: int
) -> None:
    if FACTS[optim].package:
        pytest.importorskip(FACTS[optim].package)
    config = make_config(Path("m"), optim=optim, optim_args=optim_args)
    assert config.moment_bytes() == num_bytes
    weight = torch.nn.Parameter(torch.zeros(128, 64))
    optimizer = make_optimizer({"w": weight}, config)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept: list[torch.Tensor] = [kept for kept in optimizer.state[weight].values() if isinstance(kept, torch.Tensor)]
    moments = [tensor for tensor in kept if tensor.numel() >= weight.numel()]
    assert sum(tensor.nbytes for tensor in moments) == num_bytes * weight.numel()


def test_muon_trains_matrices_and_leaves_the_ends_of_the_model_to_adamw(tiny_model: Path) -> None:
    core = make_core(tiny_model, optim="muon", learning_rate=0.1)
    before = weights(core)
    core.accumulate([make_row([5, 6, 7], [0, 1, 1])])
    core.step()
    moved = {name: tensor - before[name] for name, tensor in weights(core).items()}
    matrix = moved["model.layers.0.mlp.up_proj.weight"]
    # Newton-Schulz iterations leave large singular values between 0.5 and 1.5. A matrix of 128 rows with 64 values of 1
    # has 1 / sqrt(128) as the root of the mean of its squares. So the step is 0.2 sqrt(128) times the learning rate.
    library: Any = torch
    values: torch.Tensor = library.linalg.svdvals(matrix.float()) / (0.1 * 0.2 * math.sqrt(128))
    assert 0.5 < values.max() < 1.5
    for name in ("lm_head.weight", "model.norm.weight"):
        # A step of AdamW has the size of the learning rate, except where the gradient is as small as its epsilon.
        assert moved[name].abs().max().item() == pytest.approx(0.1, rel=1e-2)


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.05}},
    ],
)
def test_schedules_that_read_the_learning_rate_of_the_optimizer_find_it_in_muon(schedule: dict[str, Any]) -> None:
    config = make_config(Path("m"), optim="muon", learning_rate=0.1, **schedule)
    optimizer = make_optimizer({"matrix": torch.nn.Parameter(torch.zeros(2, 2))}, config)
    make_scheduler(optimizer, config, total_steps=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_weight_decay_goes_by_the_names_transformers_goes_by() -> None:
    spared = [
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "layers.1.self_attn.q_norm.weight",
        "h.0.mlp.bias",
    ]
    assert not [name for name in spared if decays(name)]
    assert decays("model.layers.0.mlp.up_proj.weight")
    assert decays("model.embed_tokens.weight")
