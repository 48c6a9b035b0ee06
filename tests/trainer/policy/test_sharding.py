"""Sharding does not change the steps: 1, 2 and 4 ranks make the same ones. And no failure makes a rank hang."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.trainer.policy.lora import adapters
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.ranks import Floats, RankLostError
from services.trainer.policy.sharding import set_dtypes_of_first_rank, shard
from shared.run_options.run_config import RunConfig
from tests.kept_ports import kept_port
from tests.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_moe, make_tiny_tokenizer
from tests.trainer.cores import CPU, make_config
from tests.trainer.policy.sharded_steps import NUM_STEPS, WITHIN_S, make_steps, run_ranks, start
from tests.trainer.tensor_files import load_file
from tests.trainer.warm_ranks import run_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(WITHIN_S + 60)]

MAX_TOKENS = 40
LOSSES_AGREE, WEIGHTS_AGREE = 1e-4, 1e-6
"""Relative and absolute tolerance. Sums over ranks round in another order, and steps of AdamW amplify that."""
WITH_ADAPTERS = {"float32": 1e-5, "bfloat16": 0.02}
"""Tolerance of the adapters after all steps. Layers are gathered in the run's dtype, so bfloat16 rounds elsewhere."""


def make_model(path: Path, *, is_tied: bool, hidden_size: int) -> Path:
    """Write a model of three layers whose weights are not evenly divisible by any number of ranks."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=is_tied,
        eos_token_id=EOS_TOKEN_ID,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path


def core_of(config: RunConfig) -> PolicyCore:
    return PolicyCore(config, model_dir_or_id=config.model, total_steps=NUM_STEPS, device=CPU)


@pytest.fixture(scope="module")
def configs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Return runs that differ in what sharding could break: tied weights, saved tensors, logprobs, a frozen base."""
    directory = tmp_path_factory.mktemp("models")
    plain: dict[str, Any] = {
        "learning_rate": 1e-3,
        "max_tokens_per_microbatch": MAX_TOKENS,
        "max_completion_length": 20,
    }
    tied = make_model(directory / "tied", is_tied=True, hidden_size=30)
    untied = make_model(directory / "untied", is_tied=False, hidden_size=28)
    return {
        "tied": make_config(
            tied,
            **plain,
            loss_type="grpo",
            entropy_coef=0.01,
            top_entropy_quantile=0.5,
            fsdp_reshard_after_forward=False,
        ),
        "untied": make_config(untied, **plain, beta=0.05, max_grad_norm=1.0),
        **{
            dtype: make_config(
                tiny_model, dtype=dtype, use_peft=True, lora_r=3, beta=0.05, learning_rate=1e-3, max_grad_norm=1.0
            )
            for dtype in WITH_ADAPTERS
        },
    }


@pytest.fixture(scope="module")
def alone(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of the runs on one rank."""
    directory = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, config in configs.items():
        (directory / name).mkdir()
        make_steps(core_of(config), directory / name)
    torch.set_num_threads(threads)
    return directory


def write_configs(directory: Path, configs: dict[str, RunConfig]) -> None:
    for name, config in configs.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(config.model_dump_json())


def assert_same_steps(
    several: Path, alone: Path, *, losses_agree: float = LOSSES_AGREE, weights_agree: float = WEIGHTS_AGREE
) -> None:
    """Compare every metric of every step, per-token arrays, and the final weights."""
    here, there = (json.loads((directory / "result.json").read_text()) for directory in (several, alone))
    assert len(here) == len(there) == NUM_STEPS
    for step, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=losses_agree, abs=1e-6), step
        assert (mine["num_rows"], mine["num_pass_tokens"]) == (theirs["num_rows"], theirs["num_pass_tokens"])
        assert max(run["num_pass_tokens"] / run["num_passes"] for run in (mine, theirs)) <= MAX_TOKENS, step
        assert mine["probe"] == pytest.approx(theirs["probe"], abs=losses_agree)
        assert mine["per_token"].keys() == theirs["per_token"].keys() == {"1", "4"}
        for row, arrays in mine["per_token"].items():
            for array, other in zip(arrays, theirs["per_token"][row], strict=True):
                assert array == pytest.approx(other, rel=losses_agree, abs=losses_agree)
    mine, theirs = (load_file(directory / "weights.safetensors") for directory in (several, alone))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=weights_agree, msg=name)


@pytest.fixture(scope="module")
def on_two_nodes(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of the runs on two ranks, each of which is on a node of its own."""
    directory = tmp_path_factory.mktemp("two_nodes")
    write_configs(directory, configs)
    endpoint = f"127.0.0.1:{kept_port()}"
    nodes = [start(directory, num_ranks=1, num_nodes=2, node_rank=rank, endpoint=endpoint) for rank in (0, 1)]
    try:
        for rank, node in enumerate(nodes):
            output, _ = node.communicate(timeout=WITHIN_S)
            assert node.returncode == 0, f"node {rank}: {output}"
    finally:
        for node in nodes:
            node.terminate()
            node.communicate(timeout=120)
    return directory


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_two_ranks_on_two_nodes_make_the_steps_of_one(name: str, on_two_nodes: Path, alone: Path) -> None:
    assert_same_steps(on_two_nodes / name, alone / name)


@pytest.mark.parametrize(("dtype", "tolerance"), WITH_ADAPTERS.items())
def test_adapters_beside_a_sharded_base_learn_what_they_learn_on_one_rank(
    dtype: str, tolerance: float, on_two_nodes: Path, alone: Path, configs: dict[str, RunConfig]
) -> None:
    names = list(adapters(core_of(configs[dtype]).lm))
    troubles = json.loads((on_two_nodes / dtype / "troubles.json").read_text())
    assert troubles["described"] == troubles["read"]
    assert [name for name, _, _ in troubles["read"]] == names
    mine, theirs = (load_file(path / dtype / "weights.safetensors") for path in (on_two_nodes, alone))
    assert mine.keys() == theirs.keys() == set(names)
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name].float(), tensor.float(), rtol=0, atol=tolerance, msg=name)
    found, expected = (json.loads((path / dtype / "result.json").read_text()) for path in (on_two_nodes, alone))
    for step, (here, there) in enumerate(zip(found, expected, strict=True)):
        for metric in ("loss", "kl"):
            value = pytest.approx(there["metrics"][metric], rel=10 * tolerance, abs=tolerance)
            assert here["metrics"][metric] == value, (step, metric)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_two_ranks_survive_troubles(name: str, on_two_nodes: Path) -> None:
    troubles = json.loads((on_two_nodes / name / "troubles.json").read_text())
    assert troubles["described"] == troubles["read"]
    assert troubles["first_name"] == troubles["read"][0][0]
    assert troubles["given_up"]
    assert troubles["overtaken"]
    assert troubles["at_fault"] == [1, 3]
    assert "nowhere" in troubles["not_loaded"]
    assert troubles["weights_are_as_they_were"]
    assert troubles["steps_after"] == 1
    assert troubles["moved"] > 1e-4


def test_four_ranks_make_the_steps_of_one(configs: dict[str, RunConfig], alone: Path, tmp_path: Path) -> None:
    write_configs(tmp_path, {"tied": configs["tied"]})
    run_group("tests.trainer.policy.sharded_steps", str(tmp_path), num_ranks=4, directory=tmp_path)
    assert_same_steps(tmp_path / "tied", alone / "tied")


class RankOfTwo:
    """One of two ranks, which sees what was exchanged before."""

    size, mesh = 2, None

    def __init__(self, rank: int, exchanged: list[Floats]) -> None:
        self.rank, self.exchanged = rank, exchanged

    def gather(self, array: Floats) -> list[Floats]:
        self.exchanged.append(array)
        return [*self.exchanged]


def test_weights_built_from_a_config_get_the_dtypes_of_those_that_were_loaded() -> None:
    loaded = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).to(torch.bfloat16))
    with torch.device("meta"):
        built = torch.nn.Sequential(torch.nn.Linear(2, 2).to(torch.bfloat16), torch.nn.BatchNorm1d(2))
    exchanged: list[Floats] = []
    set_dtypes_of_first_rank(loaded, RankOfTwo(0, exchanged))
    set_dtypes_of_first_rank(built, RankOfTwo(1, exchanged))
    assert all(tensor.is_meta for tensor in built.state_dict().values())
    dtypes = [{name: tensor.dtype for name, tensor in it.state_dict().items()} for it in (loaded, built)]
    assert dtypes[0] == dtypes[1]
    assert {torch.float32, torch.bfloat16} <= set(dtypes[0].values())


class LostRanks(RankOfTwo):
    """The other rank does not come."""

    def gather(self, array: Floats) -> list[Floats]:
        raise RankLostError("it did not come")


def test_dtypes_are_exchanged_before_anything_is_sharded(configs: dict[str, RunConfig]) -> None:
    module = torch.nn.Module()
    module.lm = torch.nn.Linear(2, 2)
    with pytest.raises(RankLostError):
        shard(module, configs["tied"], ranks=LostRanks(0, []), device=CPU)


@pytest.mark.long
@pytest.mark.timeout(2 * WITHIN_S)
def test_two_ranks_balance_experts_as_one_does(tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "model")
    # The load-balancing loss is computed per pass. One row in each gives one rank and two ranks the same passes.
    config = make_config(model, router_aux_loss_coef=0.1, packing=False, learning_rate=1e-3)
    by_one = tmp_path / "by_one"
    by_one.mkdir()
    make_steps(core_of(config), by_one)
    by_two = tmp_path / "by_two"
    by_two.mkdir()
    write_configs(by_two, {"experts": config})
    run_ranks(by_two, num_ranks=2)
    assert_same_steps(by_two / "experts", by_one)
    assert all("aux_loss" in step["metrics"] for step in json.loads((by_one / "result.json").read_text()))
