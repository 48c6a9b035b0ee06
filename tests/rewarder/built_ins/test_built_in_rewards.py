"""The built-in rewards against values computed by hand. They run in the main thread here, as in a worker."""

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from math_verify import parse as parse_of_math_verify

from services.rewarder.built_ins import accuracy
from services.rewarder.built_ins.accuracy import accuracy_reward
from services.rewarder.built_ins.built_in_rewards import BUILT_INS, built_in, unknown_name
from services.rewarder.built_ins.overlong import soft_overlong_punishment_reward
from services.rewarder.built_ins.reasoning_accuracy import reasoning_accuracy_reward
from services.rewarder.built_ins.think_format import think_format_reward
from services.rewarder.reward_call import CallError, Verdict
from shared.messages import Completion

pytestmark = pytest.mark.unit

GSM8K = (
    ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 altogether.\n#### 72", "72"),
    ("He drove 20 miles twice, so 2*20=40 miles.\nThat leaves 1,040 - 40 = 1,000.\n#### 1,000", "1000"),
    ("Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n#### 10", "10"),
    ("The balance is 5 - 8 = -3 dollars.\n#### -3", "-3"),
)  # fmt: skip


def outcomes(completions: list[str], gold: object) -> list[tuple[str, float | None]]:
    verdicts = accuracy_reward(list(completions), solution=[gold] * len(completions))
    return [(verdict.outcome, verdict.value) for verdict in verdicts]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("42", r"so it is \boxed{42}", r"so it is \boxed{41}"),
        (r"\frac{1}{3}", r"\boxed{\frac{2}{6}}", r"\boxed{\frac{1}{2}}"),
        ("1/2", r"\boxed{0.5}", r"\boxed{5}"),
        ("$x^2+2x+1$", r"\boxed{(x+1)^2}", r"\boxed{(x-1)^2}"),
        (42, r"\boxed{42}", "no answer at all"),
        (42.0, r"\boxed{42}", r"\boxed{4}"),
        (0.00001, r"\boxed{10^{-5}}", r"\boxed{1}"),
        (-1.5e-8, r"\boxed{-15 \times 10^{-9}}", r"\boxed{-3 \times 10^{-8}}"),
        (-1.5e-8, r"\boxed{-0.000000015}", r"\boxed{0.0}"),
        (1e-5, r"\boxed{0.00001}", r"\boxed{0.0000104}"),
        (1e16, r"\boxed{10000000000000000}", r"\boxed{1}"),
        (6.02e23, r"\boxed{6.02 \times 10^{23}}", r"\boxed{6.02}"),
    ],
)
def test_an_equal_answer_is_1_and_another_is_0(gold: object, right: str, wrong: str) -> None:
    assert outcomes([right, wrong], gold) == [("scored", 1.0), ("scored", 0.0)]


@pytest.mark.parametrize("gold", ["nobody knows", "", None, ["42"], float("nan")])
def test_a_gold_answer_that_does_not_parse_is_not_applicable(gold: object) -> None:
    assert outcomes([r"\boxed{42}"], gold) == [("not_applicable", None)]


@pytest.mark.parametrize(("gold", "number"), GSM8K)
def test_gsm8k_gold_answers_are_read_after_the_mark(gold: str, number: str) -> None:
    completions = [rf"\boxed{{{number}}}", f"so\n#### {number}", r"\boxed{48}", "#### 48", "48"]
    assert outcomes(completions, gold) == [("scored", 1.0), ("scored", 1.0), *[("scored", 0.0)] * 3]


def test_only_the_line_of_the_mark_counts_in_a_completion() -> None:
    completions = ["#### 72\n\nThat is 6 dozen.", "####\n72\nin 2 months", "#### 71\n\nChecking: 24 + 48 = 72"]
    assert outcomes(completions, GSM8K[0][0]) == [("scored", 1.0), ("scored", 1.0), ("scored", 0.0)]


@pytest.mark.parametrize(
    "completion", ["#### Final Answer\n\n72", "#### Answer\n$72$", "####\n$$\n72\n$$", "#### \\[\n72\n\\]"]
)
def test_below_a_heading_with_the_mark_the_answer_is_found(completion: str) -> None:
    assert outcomes([completion], GSM8K[0][0]) == [("scored", 1.0)]


def test_the_mark_counts_in_a_completion_only_where_the_dataset_uses_it() -> None:
    assert outcomes(["#### 72"], "72") == [("scored", 0.0)]


def test_real_gsm8k_rows_judge_their_own_answer_right_and_another_wrong() -> None:
    file = os.environ.get("GSM8K_JSONL")
    if not file:
        pytest.skip("set GSM8K_JSONL to a .jsonl file of GSM8K to judge its real rows")
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert rows
    for row in rows:
        number = row["answer"].rpartition("####")[2].strip().replace(",", "")
        wrong = str(int(number) + 1)
        expected = [("scored", 1.0), ("scored", 0.0)]
        assert outcomes([rf"\boxed{{{number}}}", rf"\boxed{{{wrong}}}"], row["answer"]) == expected, row


def test_the_gold_answers_may_stand_in_either_column_and_solution_wins() -> None:
    assert accuracy_reward([r"\boxed{1}"], answer=["1"]) == [Verdict("scored", 1.0)]
    assert accuracy_reward([r"\boxed{1}"], solution=["1"], answer=["2"]) == [Verdict("scored", 1.0)]
    with pytest.raises(CallError, match="'solution' or 'answer'"):
        accuracy_reward([r"\boxed{1}"])


def test_messages_are_read_like_text() -> None:
    completion = [{"role": "assistant", "content": r"\boxed{1}"}]
    assert accuracy_reward([completion], solution=["1"]) == [Verdict("scored", 1.0)]
    assert think_format_reward([[{"role": "assistant", "content": "<think>a</think>b"}]]) == [1.0]


def test_a_comparison_without_end_is_a_timeout_and_not_a_zero() -> None:
    assert outcomes([r"\boxed{100000000!}", r"\boxed{42}"], "42") == [("timeout", None), ("scored", 1.0)]


@pytest.mark.parametrize("slow", ["slow", r"\boxed{slow}"])
def test_an_answer_or_gold_that_takes_too_long_to_read_is_a_timeout(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, *, raise_on_error: bool = False, **options: Any) -> list[Any]:
        """Parse as math-verify does, but never end for a given text."""
        while text == slow:
            pass
        return cast("list[Any]", parse_of_math_verify(text, raise_on_error=raise_on_error, **options))

    monkeypatch.setattr(accuracy, "parse", parse)
    monkeypatch.setattr(accuracy, "STEP_TIMEOUT_S", 0.5)
    assert outcomes([slow, r"\boxed{42}"], "42") == [("timeout", None), ("scored", 1.0)]
    assert outcomes([r"\boxed{42}"], slow) == [("timeout", None)]
    (unfinished,) = reasoning_accuracy_reward(["<think> on and on"], solution=[slow])
    assert (unfinished.outcome, unfinished.value) == ("timeout", None)


def test_an_error_of_the_parser_is_an_answer_that_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, *, raise_on_error: bool = False, **options: Any) -> list[Any]:
        if "odd" in text and raise_on_error:
            raise ValueError("not expected")
        if "odd" in text:
            return []
        return cast("list[Any]", parse_of_math_verify(text, raise_on_error=raise_on_error, **options))

    monkeypatch.setattr(accuracy, "parse", parse)
    assert outcomes([r"\boxed{odd}"], "42") == [("scored", 0.0)]
    assert outcomes([r"\boxed{42}"], "odd") == [("not_applicable", None)]


def test_the_think_format_is_one_block_at_the_start() -> None:
    texts = [
        "<think>\na\n</think>\nb",
        "<think>a</think>",
        "a",
        "x<think>a</think>",
        "<think>a",
        "<think><think>a</think>",
    ]
    assert think_format_reward(list(texts)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_overlong_punishment_falls_within_the_last_fifth() -> None:
    ids = [[0] * length for length in (1, 80, 81, 90, 100, 101)]
    # 100 tokens are allowed, so the penalty covers the last 20: 0 up to 80, then -1/20 per token, -1 from 100 on.
    assert soft_overlong_punishment_reward(ids, max_completion_length=100) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]


def test_trl_s_name_of_the_factory_is_understood() -> None:
    assert built_in("get_soft_overlong_punishment") is BUILT_INS["soft_overlong_punishment_reward"]


def test_an_unknown_name_gets_the_list_and_the_nearest() -> None:
    message = str(unknown_name("think_reward"))
    assert "Did you mean 'think_format_reward'?" in message
    assert all(name in message for name in BUILT_INS)


def test_in_a_mixture_the_gold_answer_is_in_whichever_column_the_row_has() -> None:
    completions: list[Completion] = [r"\boxed{42}", r"\boxed{42}", r"\boxed{42}"]
    verdicts = accuracy_reward(completions, solution=[None, "42", None], answer=["#### 42", None, None])
    assert [verdict.value for verdict in verdicts] == [1.0, 1.0, None]
