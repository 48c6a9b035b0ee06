import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from services.trainer.checkpoints.checkpoint import load_into, newest_valid
from services.trainer.data.prompt_encoder import load_tokenizer
from services.trainer.policy.core_results import StepStats
from services.trainer.policy.policy_core import PolicyCore
from shared.errors import HeadraceError
from shared.run_options.optimizers import FACTS
from tests.checkpoints import save_checkpoint
from tests.tiny_model import VOCAB_SIZE
from tests.trainer.cores import assert_same_weights, make_config, make_core, random_rows, weights
from tests.trainer.tensor_files import load_file


def trained_core(model: Path, *, total_steps: int = 6, **settings: object) -> PolicyCore:
    """Return a core that uses everything with a state: momentum, weight decay, clipping, a schedule."""
    return make_core(
        model,
        total_steps=total_steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        **settings,
    )


def train(core: PolicyCore, steps: range) -> list[StepStats]:
    stats: list[StepStats] = []
    for step in steps:
        core.accumulate(random_rows(6, seed=step))
        stats.append(core.step())
    return stats


def test_a_run_that_was_made_longer_is_resumed_as_it_would_have_gone_on(tiny_model: Path, tmp_path: Path) -> None:
    """The checkpoint is older than the change, and the new process reads the new length from the run's record."""
    core = trained_core(tiny_model)
    train(core, range(3))
    save_checkpoint(tmp_path, core, {}, step=3, keep=1)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    resumed = trained_core(tiny_model, total_steps=9)
    load_into(resumed, checkpoint)
    for one, length in ((core, 9), (resumed, None)):
        for step in (3, 4):
            one.accumulate(random_rows(6, seed=step))
            one.step(length)
    assert_same_weights(weights(core), weights(resumed))


RNG = "rng/rank-00001.safetensors"
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def contents(directory: Path) -> dict[str, str]:
    """Return every tensor as bytes, and every other file except the manifest unchanged."""
    found: dict[str, str] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"):
        name = path.relative_to(directory).as_posix()
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            found |= {
                f"{name}:{key}": tensor.view(-1).view(torch.uint8).numpy().tobytes().hex()
                for key, tensor in tensors.items()
            }
        else:
            found[name] = path.read_text()
    return found


def save_state(core: PolicyCore, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    core.begin_save(directory, None).result(timeout=120)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_a_restart_and_three_more_are_six_steps_to_the_last_bit(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    straight = trained_core(tiny_model, dtype=dtype)
    straight_stats = train(straight, range(6))

    first = trained_core(tiny_model, dtype=dtype)
    train(first, range(3))
    save_checkpoint(tmp_path, first, {"cursor": 24}, step=first.policy_version, keep=2)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.extra) == (3, {"cursor": 24})
    resumed = trained_core(tiny_model, dtype=dtype)
    load_into(resumed, checkpoint)
    assert resumed.policy_version == 3
    assert_same_weights(weights(resumed), weights(first))
    resumed_stats = train(resumed, range(3, 6))

    assert resumed_stats == straight_stats[3:]  # learning rates, gradient norms and losses are exactly equal
    # Compare the float32 masters, not the pushed weights, which are rounded under bfloat16.
    save_checkpoint(tmp_path / "straight", straight, {}, step=6, keep=1)
    resumed_path = save_checkpoint(tmp_path / "resumed", resumed, {}, step=6, keep=1)
    expected = contents(tmp_path / "straight" / "step_00000006")
    assert {"core_state.json", f"optimizer/{SHARD}:exp_avg_sq/lm_head.weight", f"{RNG}:cpu"} <= expected.keys()
    assert contents(resumed_path) == expected


def test_a_checkpoint_before_the_first_step_resumes_too(tiny_model: Path, tmp_path: Path) -> None:
    fresh, straight = trained_core(tiny_model), trained_core(tiny_model)
    save_state(fresh, tmp_path)
    resumed = trained_core(tiny_model)
    train(resumed, range(2))  # the core's previous state is replaced
    resumed.load_state(tmp_path)
    assert resumed.policy_version == 0
    train(resumed, range(3))
    train(straight, range(3))
    assert_same_weights(weights(resumed), weights(straight))


@pytest.mark.parametrize(
    "optim",
    [
        *("adamw_torch", "sgd", "rmsprop", "adagrad", "adafactor", "muon", "sgd momentum=0.9", "rmsprop centered=true"),
        *("adamw_8bit", "paged_adamw_32bit", "lion_8bit", "ademamix_8bit", "rmsprop_bnb_8bit"),
    ],
)
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_every_optimizer_resumes_to_the_last_bit(tiny_model: Path, tmp_path: Path, optim: str, num_before: int) -> None:
    optim, _, arguments = optim.partition(" ")
    settings: dict[str, Any] = {"optim": optim, "optim_args": arguments or None}
    if package := FACTS[make_config(tiny_model, optim=optim).optim].package:
        pytest.importorskip(package)
    straight = trained_core(tiny_model, **settings)
    train(straight, range(3))
    first = trained_core(tiny_model, **settings)
    train(first, range(num_before))
    save_checkpoint(tmp_path, first, {}, step=num_before, keep=1)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    resumed = trained_core(tiny_model, **settings)
    load_into(resumed, checkpoint)
    train(resumed, range(num_before, 3))
    assert_same_weights(weights(resumed), weights(straight))


def test_the_random_generator_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    core = trained_core(tiny_model)
    torch.manual_seed(123)
    save_state(core, tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(999)
    core.load_state(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_transformers_loads_the_model_in_a_checkpoint_of_one_rank_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    core = trained_core(tiny_model)
    train(core, range(2))
    path = save_checkpoint(tmp_path, core, {}, step=2, keep=1, tokenizer=load_tokenizer(str(tiny_model)))
    loaded = AutoModelForCausalLM.from_pretrained(path / "model")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights(core)[name]), name
    assert AutoTokenizer.from_pretrained(path / "model")("abc")["input_ids"] == [4, 5, 6]


def test_nothing_in_a_checkpoint_is_a_pickle(tiny_model: Path, tmp_path: Path) -> None:
    core = trained_core(tiny_model)
    train(core, range(1))
    path = save_checkpoint(tmp_path, core, {}, step=1, keep=1, tokenizer=load_tokenizer(str(tiny_model)))
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".jinja", ".safetensors"}


def test_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = Qwen3Config.from_pretrained(tiny_model, vocab_size=VOCAB_SIZE + 1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    save_state(trained_core(tmp_path / "other"), tmp_path / "state")
    with pytest.raises(HeadraceError, match="belongs to another model"):
        trained_core(tiny_model).load_state(tmp_path / "state")


def test_a_checkpoint_whose_optimizer_knows_other_weights_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    core = trained_core(tiny_model)
    train(core, range(1))
    save_state(core, tmp_path / "trained")
    shutil.copy(tmp_path / "trained" / "model" / SHARD, tmp_path / "trained" / "optimizer" / SHARD)
    with pytest.raises(HeadraceError, match=r"optimizer does not fit this model: .* is not in the model"):
        trained_core(tiny_model).load_state(tmp_path / "trained")
