"""Files that contradict each other are found, whichever of them is wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos import workload
from tests.benchmarks.chaos.left_files import PROMPTS, Files

pytestmark = pytest.mark.unit


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_reward_of_a_conversation_counts_what_the_policy_wrote() -> None:
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": "abcd", "tool_calls": []},
        {"role": "tool", "content": "xyz"},
        {"role": "assistant", "content": "abcdef"},
    ]
    assert workload.length_reward({"completion": said, "num_tokens": 1}) == 3.0  # (4 + 6) % 7
    assert workload.length_reward({"completion": "abcdefghij", "num_tokens": 8}) == 1.0


def sample_a_completion_twice(files: Files) -> None:
    files.rollouts[2][1]["branch"] = 0


def leave_out_a_completion(files: Files) -> None:
    del files.rollouts[2][1]


def give_a_completion_the_reward_of_another(files: Files) -> None:
    files.rollouts[2][0]["rewards"]["chaos_rewards:length"]["value"] = 4.0


def train_on_another_reward_than_was_given(files: Files) -> None:
    files.rollouts[2][0]["reward"] = 2.0


def score_before_sampling(files: Files) -> None:
    files.rollouts[2][0]["stamps"][3][1] = 1.5


def train_a_prompt_under_two_numbers(files: Files) -> None:
    for row in files.rollouts[3][:2]:
        row["prompt"] = PROMPTS[0]


def report_another_reward(files: Files) -> None:
    files.metrics[1]["reward"] = 2.5


def count_the_tokens_of_a_step_twice(files: Files) -> None:
    for row in files.metrics[1:]:
        row["num_tokens"] += 48.0


def count_a_drop_that_the_ledger_does_not_hold(files: Files) -> None:
    files.metrics[2] |= {"groups/dropped": 2.0, "groups/dropped/unscorable": 1.0}


def count_fewer_admitted_groups_than_before(files: Files) -> None:
    files.metrics[2]["groups/admitted"] = 5.0


def evaluate_a_step_twice(files: Files) -> None:
    files.evaluations.insert(1, files.evaluations[0])


def leave_out_an_evaluation(files: Files) -> None:
    del files.evaluations[0]


def leave_out_the_last_evaluation(files: Files) -> None:
    del files.evaluations[1], files.evaluated[3]


def evaluate_a_prompt_twice(files: Files) -> None:
    files.evaluated[1][2:] = files.evaluated[1][:2]


def keep_the_completions_of_an_evaluation_that_was_lost(files: Files) -> None:
    files.evaluated[2] = files.evaluated[1]


def miss_a_prompt_of_an_evaluation(files: Files) -> None:
    files.evaluations[0]["eval_groups/done"] = 1


def show_other_counts_than_the_ledger(files: Files) -> None:
    files.run["progress"]["groups_trained"] = 5


def flip_a_bit_of_a_checkpoint(files: Files) -> None:
    def flip(checkpoint: Path) -> None:
        shard = checkpoint / "optimizer" / "shard.safetensors"
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    files.damage = flip


def cut_a_checkpoint(files: Files) -> None:
    files.damage = lambda checkpoint: os.truncate(checkpoint / "model" / "model.safetensors", 20)


def train_a_number_that_is_not_one(files: Files) -> None:
    files.weights = files.final_weights = {"w": np.array([1.0, np.nan], np.float32)}


def make_a_step_of_the_optimizer_twice(files: Files) -> None:
    files.adam_step = 4


def publish_other_weights_than_were_trained(files: Files) -> None:
    files.final_weights = {"w": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("breach", "sentence"),
    [
        (sample_a_completion_twice, "step 2: its groups do not have 2 completions each, once"),
        (leave_out_a_completion, "step 2: its groups do not have 2 completions each, once"),
        (give_a_completion_the_reward_of_another, "step 2, group 00000002: a completion has the reward of another"),
        (
            train_on_another_reward_than_was_given,
            "step 2, group 00000002: the reward 2.0 is not the sum of "
            "{'chaos_rewards:length': 1.0, 'chaos_rewards:slow': 2.0}",
        ),
        (
            score_before_sampling,
            "step 2, group 00000002: its stamps are out of order: [['admitted', 0.0, 'replica-0'], "
            "['claimed', 1.0, 'replica-0'], ['generated', 2.0, 'replica-0'], ['scored', 1.5, 'replica-0'], "
            "['trained', 4.0, 'replica-0']]",
        ),
        (train_a_prompt_under_two_numbers, "epoch 0 trained prompts twice: reverse aa ="),
        (report_another_reward, "metrics of step 2: reward is 2.5, but its rollouts give 3.0"),
        (count_the_tokens_of_a_step_twice, "metrics of step 2: num_tokens is 144.0, but its rollouts give 96.0"),
        (
            count_a_drop_that_the_ledger_does_not_hold,
            "metrics of step 3 dropped {'stale': 1, 'unscorable': 1}, the ledger {'stale': 1}",
        ),
        (count_fewer_admitted_groups_than_before, "metrics of step 3: groups/admitted falls from 6.0 to 5.0"),
        (evaluate_a_step_twice, "the evaluation of step 1 comes after the evaluation of step 1"),
        (leave_out_an_evaluation, "2 evaluations are accounted for up to step 3; 3 were due"),
        (leave_out_the_last_evaluation, "1 evaluations were made or skipped; 3 were due"),
        (
            evaluate_a_prompt_twice,
            "the evaluation of step 1 has 2 prompts and 4 completions; 2 prompts and 4 were due",
        ),
        (
            keep_the_completions_of_an_evaluation_that_was_lost,
            "evaluations of steps [2] have completions, but no line in evaluations.jsonl",
        ),
        (
            miss_a_prompt_of_an_evaluation,
            "the evaluation of step 1 has 1 prompts and 4 completions; 2 prompts and 4 were due",
        ),
        (
            show_other_counts_than_the_ledger,
            "the run API says {'step': 3, 'policy_version': 3, 'groups_admitted': 7, 'groups_trained': 5, "
            "'groups_dropped': {'stale': 1}}; the ledger has {'step': 3, 'policy_version': 3, 'groups_admitted': 7, "
            "'groups_trained': 6, 'groups_dropped': {'stale': 1}}",
        ),
        (flip_a_bit_of_a_checkpoint, "step_00000003/optimizer/shard.safetensors is not what its manifest says"),
        (train_a_number_that_is_not_one, "step_00000003: w has numbers that are not finite"),
        (make_a_step_of_the_optimizer_twice, "step_00000003: the optimizer made 4 steps"),
        (publish_other_weights_than_were_trained, "the final model has other weights than its checkpoint: w"),
    ],
)
def test_a_contradiction_is_found(files: Files, breach: Callable[[Files], None], sentence: str) -> None:
    breach(files)
    assert sentence in files.verdict().broken


def test_a_checkpoint_that_does_not_load_is_found(files: Files) -> None:
    cut_a_checkpoint(files)
    (sentence,) = files.verdict().broken
    assert sentence.startswith("the weights of step_00000003 do not load: ")


def test_a_run_that_was_stopped_owes_no_more_evaluations(files: Files) -> None:
    leave_out_the_last_evaluation(files)
    files.run |= {"status": "stopped", "desired": "stop"}
    assert files.verdict().broken == []
