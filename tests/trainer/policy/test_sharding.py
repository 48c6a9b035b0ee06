"""Sharding does not change the steps: 1, 2 and 4 ranks make the same ones. And no failure makes a rank hang."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.local.process_table import mark, wait_until_gone
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.supervision.rank_launcher import Node, launch
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.kept_ports import kept_port
from tests.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_moe, make_tiny_tokenizer
from tests.trainer.cores import CPU, make_config
from tests.trainer.policy.sharded_steps import NUM_STEPS, WITHIN_S, make_steps, run_ranks, start
from tests.trainer.tensor_files import load_file

MAX_TOKENS = 40
LOSSES_AGREE, WEIGHTS_AGREE = 1e-4, 1e-6
"""Relative and absolute tolerance. Sums over ranks round in another order, and twenty steps of AdamW amplify that."""


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


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Return runs that differ in what sharding could break: tied weights, saved tensors, computed logprobs."""
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
    }


@pytest.fixture(scope="module")
def alone(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of the runs on one rank."""
    directory = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, config in configs.items():
        (directory / name).mkdir()
        core = PolicyCore(config, model_dir_or_id=config.model, total_steps=NUM_STEPS, device=CPU)
        make_steps(core, directory / name)
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


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 20)
def test_two_ranks_on_two_nodes_make_the_steps_of_one_and_survive_troubles(
    configs: dict[str, RunConfig], alone: Path, tmp_path: Path
) -> None:
    write_configs(tmp_path, configs)
    endpoint = f"127.0.0.1:{kept_port()}"
    nodes = [start(tmp_path, num_ranks=1, num_nodes=2, node_rank=rank, endpoint=endpoint) for rank in (0, 1)]
    try:
        for rank, node in enumerate(nodes):
            output, _ = node.communicate(timeout=WITHIN_S)
            assert node.returncode == 0, f"node {rank}: {output}"
    finally:
        for node in nodes:
            node.terminate()
            node.communicate(timeout=120)
    for name in configs:
        assert_same_steps(tmp_path / name, alone / name)

    troubles = json.loads((tmp_path / "troubles.json").read_text())
    assert troubles["described"] == troubles["read"]
    assert troubles["first_name"] == troubles["read"][0][0]
    assert troubles["given_up"]
    assert troubles["overtaken"]
    assert troubles["at_fault"] == [1, 3]
    assert "nowhere" in troubles["not_loaded"]
    assert troubles["weights_are_as_they_were"]
    assert troubles["steps_after"] == 1
    assert troubles["moved"] > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 20)
def test_four_ranks_make_the_steps_of_one(configs: dict[str, RunConfig], alone: Path, tmp_path: Path) -> None:
    write_configs(tmp_path, {"tied": configs["tied"]})
    run_ranks(tmp_path, num_ranks=4)
    assert_same_steps(tmp_path / "tied", alone / "tied")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * WITHIN_S)
def test_two_ranks_balance_experts_as_one_does(tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "model")
    # The load-balancing loss is computed per pass. One row in each gives one rank and two ranks the same passes.
    config = make_config(model, router_aux_loss_coef=0.1, packing=False, learning_rate=1e-3)
    by_one = tmp_path / "by_one"
    by_one.mkdir()
    make_steps(PolicyCore(config, model_dir_or_id=config.model, total_steps=NUM_STEPS, device=CPU), by_one)
    by_two = tmp_path / "by_two"
    by_two.mkdir()
    write_configs(by_two, {"experts": config})
    run_ranks(by_two, num_ranks=2)
    assert_same_steps(by_two / "experts", by_one)
    assert all("aux_loss" in step["metrics"] for step in json.loads((by_one / "result.json").read_text()))


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore this process's signal handlers, which torchrun replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [
        ((0, 0), 0, ""),
        # torchrun ends the other rank, unless that one ends first.
        ((2, 0), 2, r"exit statuses by rank: \{0: 2(, 1: -15)?\}"),
        ((3, 0), 3, r"exit statuses by rank: \{0: 3(, 1: -15)?\}"),
        ((0, 1), 1, r"exit statuses by rank: \{(0: -15, )?1: 1\}"),
        ((0, -9), 1, "training rank 1 was killed by signal 9"),
    ],
)
def test_exit_statuses_of_ranks_keep_their_meaning(
    statuses: tuple[int, int], status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"import os, sys; s = {statuses}[int(os.environ['RANK'])]; s < 0 and os.kill(os.getpid(), -s); sys.exit(s)"
    node = Node("run-x", 2, 1, 0, "127.0.0.1:0", (sys.executable, "-S", "-c", code), timeout_s=20, stop_grace_s=20)
    assert launch(node) == status
    assert re.search(said, caplog.messages[-1] if status else "")


@pytest.mark.usefixtures("own_signals")
def test_the_launcher_says_what_the_failing_rank_said_and_not_what_its_victims_saw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As with real ranks, the victim notices nothing before the other rank has reported why it ends.
    code = (
        "import os, pathlib, sys, time\n"
        "from services.trainer.ranks.rank_words import leave_word\n"
        "said, rank = pathlib.Path(sys.argv[1]), int(os.environ['RANK'])\n"
        "while rank == 0 and not said.exists(): time.sleep(0.01)\n"
        "leave_word(['lost the others', 'out of memory'][rank], status=1, is_loss=rank == 0)\n"
        "said.touch()\n"
        "sys.exit(1)\n"
    )
    command = (sys.executable, "-c", code, str(tmp_path / "said"))
    assert launch(Node("run-x", 2, 1, 0, "127.0.0.1:0", command, timeout_s=20, stop_grace_s=20)) == 1
    assert caplog.messages[-1].endswith("started again: training rank 1: out of memory")


@pytest.mark.usefixtures("own_signals")
def test_a_rendezvous_on_an_address_of_another_machine_is_refused_with_a_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node("run-x", 1, 2, 0, "192.0.2.1:1", (sys.executable, "-c", "pass"), timeout_s=20, stop_grace_s=20)
    assert launch(node) == 2
    assert "cannot meet at 192.0.2.1:1" in caplog.messages[-1]


@pytest.mark.usefixtures("own_signals")
def test_a_rendezvous_at_a_name_that_leads_nowhere_yet_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """After a pod was replaced, its name may still resolve to the old pod, or to nothing, because DNS is cached."""
    node = Node("run-x", 1, 2, 0, "trainer-0.invalid:1", (sys.executable, "-c", "pass"), timeout_s=20, stop_grace_s=20)
    assert launch(node) == 1
    assert "trainer-0.invalid does not resolve to this machine" in caplog.messages[-1]


async def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "from services.trainer.ranks.rank_group import die_with_launcher\n"
        "die_with_launcher()\n"
        "(pathlib.Path(sys.argv[1]) / os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    launcher = start(tmp_path, num_ranks=2, worker=[sys.executable, "-c", code])
    try:
        await eventually(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        ranks = [mark(int((tmp_path / rank).read_text())) for rank in "01"]
        assert None not in ranks
    finally:
        launcher.kill()
        launcher.communicate(timeout=120)
    assert wait_until_gone([rank for rank in ranks if rank is not None], timeout_s=10) == []
