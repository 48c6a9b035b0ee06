"""Built-in rewards that compare a completion with its row or the run's settings; values computed by hand."""

import sys
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from services.rewarder.built_ins import json_schema
from services.rewarder.built_ins.exact_match import exact_match_reward
from services.rewarder.built_ins.json_schema import check_schema, json_schema_reward
from services.rewarder.built_ins.numeric_match import completion_number, gold_number, numeric_match_reward
from services.rewarder.built_ins.overlong import soft_overlong_punishment_reward
from services.rewarder.built_ins.reasoning_accuracy import reasoning_accuracy_reward
from services.rewarder.built_ins.regex_match import check_pattern, regex_reward
from services.rewarder.built_ins.repetition import repetition_penalty_reward
from services.rewarder.built_ins.time_limit import TimeIsUpError, time_limit
from services.rewarder.reward_call import CallError, Verdict
from shared.messages import Completion

pytestmark = pytest.mark.unit

NOT_APPLICABLE = ("not_applicable", None)
RIGHT, WRONG = ("scored", 1.0), ("scored", 0.0)


def said(verdicts: list[Verdict]) -> list[tuple[str, float | None]]:
    return [(verdict.outcome, verdict.value) for verdict in verdicts]


def texts(*texts: str) -> list[Completion]:
    return list(texts)


# Numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 7 makes 42.", "42"), ("42", "42"), ("-3", "-3"), ("it is \u22123", "-3"), ("5-3", "3"),
        ("1,234,567.50 in all", "1234567.5"), ("one of 1,2,3", "3"), ("costs $1,000", "1000"), ("-$5", "-5"),
        (".5", "0.5"), ("1.5e3", "1500"), ("2E-2", "0.02"), ("3/4", "0.75"), ("about 50%", "50"), ("12cm", "12"),
        (r"\boxed{42} or 43", "42"), (r"\boxed{x = 7}", "7"), (r"\boxed{\frac{1}{2}} and 9", "0.5"),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75"), (r"\boxed{1{,}000}", "1000"), (r"\boxed{\$12}", "12"),
        ("#### 18\nin 3 days", "18"), ("#### 1\n#### 2", "2"), (r"\boxed{1} #### 2", "2"),
        ("The answer is 42, after 3 tries", "42"), ("Answer: **7** (of 9)", "7"), ("the answer = -1.5 or 2", "-1.5"),
        ("the answer is unknown: 3", "3"), ("My answer to question 2 is wrong", "2"),
    ],
)  # fmt: skip
def test_the_announced_number_counts_and_otherwise_the_last(text: str, number: str) -> None:
    assert completion_number(text) == gold_number(number)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\boxed{25\text{ cm}^2}", "25"), (r"\boxed{25 \text{ m}^{2}}", "25"), (r"\boxed{25 m^2}", "25"),
        (r"\boxed{9.8\,\mathrm{m\,s}^{-2}}", "9.8"), (r"\boxed{10 \text{ m/s^2}}", "10"), ("it is 25 cm^2.", "25"),
        ("The answer is 25 cm^{2}, from 5^2", "25"), ("#### 25 cm^2", "25"), (r"\boxed{90^\circ}", "90"),
        (r"\boxed{90^{\circ}}", "90"), (r"\boxed{5^{\text{th}}}", "5"), (r"\boxed{101_{2}}", "101"),
        (r"\boxed{\text{42}}", "42"), (r"\boxed{2^{10} = 1024}", "1024"), (r"2\sqrt{3} \approx 3.46", "3.46"),
        ("5^2 = 25", "25"), (r"\boxed{5 \text{ of } \frac{1}{2}}", "0.5"), ("1/2 of 3, 4", "4"),
    ],
)  # fmt: skip
def test_the_exponent_of_a_unit_is_not_the_number(text: str, number: str) -> None:
    assert completion_number(text) == gold_number(number)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{2^{10}}", r"\boxed{2^{n+1}}", "2^10", "#### 2^{10}", "The answer is 2^10.", r"\boxed{(2+3)^2}",
        r"\boxed{3 \times 10^8}", "the answer is 3 * 10^8", r"\boxed{\left(\frac{1}{2}\right)^{3}}", r"\frac{1}{2}^2",
        r"\boxed{2\sqrt{3}}", r"the answer is 2\sqrt{3}", r"\boxed{\sqrt{2} + 1}", r"\boxed{2\sqrt[3]{5}}", "2√3",
        r"\boxed{\frac{\sqrt{3}}{2}}", r"\boxed{\frac{1.5}{2}}", r"\boxed{3\frac{1}{2}}", r"#### 3 \frac{1}{2}",
        "The answer is 3 1/2", r"\boxed{3 1/2}", r"x = 2 or \boxed{x = 2\sqrt{3}}", r"We get 3 terms. \boxed{x^2}",
    ],
)  # fmt: skip
def test_roots_powers_and_mixed_numbers_are_not_read_as_another_number(text: str) -> None:
    assert completion_number(text) is None


@pytest.mark.parametrize("text", ["", "no number", "x2", "v1b", "3/0", "9" * 401, "inf", r"\frac{1}{0}"])
def test_text_that_is_not_a_number_is_none(text: str) -> None:
    assert completion_number(text) is None


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        (42, "42"), (0.1, "1/10"), ("1,000", "1000"), ("$5", "5"), ("50%", "50"), (r"50\%", "50"), ("$-3$", "-3"),
        (r"so \boxed{\frac{1}{3}}", "1/3"), ("48 + 24 = 72\n#### 72", "72"), ("1e400", "1e400"),
    ],
)  # fmt: skip
def test_a_gold_answer_is_one_number(gold: object, number: str) -> None:
    found = gold_number(gold)
    assert found is not None
    assert found == gold_number(number)


@pytest.mark.parametrize("gold", [None, "", "about 5", "5 or 6", True, [5], "x", float("nan"), float("inf"), "3/0"])
def test_a_gold_answer_that_is_not_a_number_is_not_applicable(gold: object) -> None:
    assert said(numeric_match_reward(texts("5"), solution=[gold])) == [NOT_APPLICABLE]


def test_numbers_are_compared_exactly_or_within_a_tolerance() -> None:
    completions = texts("0.3", "0.1 + 0.2 = 0.30", "0.31", "0.4", "none")
    golds: list[object] = ["0.3"] * 5
    assert said(numeric_match_reward(completions, answer=golds)) == [RIGHT, RIGHT, WRONG, WRONG, WRONG]
    assert said(numeric_match_reward(completions, answer=golds, tolerance=0.1)) == [RIGHT] * 4 + [WRONG]
    near = numeric_match_reward(completions, answer=golds, relative_tolerance=0.05)
    assert said(near) == [RIGHT, RIGHT, RIGHT, WRONG, WRONG]


def test_an_announcement_can_be_required() -> None:
    completions = texts("it is 5", "the answer is 5", "#### 5")
    verdicts = numeric_match_reward(completions, solution=list[object](["5"] * 3), announced_only=True)
    assert said(verdicts) == [WRONG, RIGHT, RIGHT]


def test_a_long_text_of_nothing_but_openings_is_read_quickly() -> None:
    with time_limit(20):
        assert completion_number("\\boxed{" * 5000 + "1" * 300 + ",111" * 5000) is not None


def test_a_long_box_without_a_number_is_read_quickly() -> None:
    with time_limit(20):
        assert completion_number("\\boxed{" + ("{" + "x" * 200 + "}") * 400 + "} 7") == 7


# Text


def test_an_exact_match_is_letter_by_letter() -> None:
    completions = texts("Paris", " Paris\n", "paris", "Paris.", "")
    golds: list[object] = ["Paris"] * 5
    assert said(exact_match_reward(completions, answer=golds)) == [RIGHT, RIGHT, WRONG, WRONG, WRONG]
    golds = ["PARIS"] * 5
    assert said(exact_match_reward(completions, answer=golds, ignore_case=True)) == [RIGHT] * 3 + [WRONG] * 2


def test_an_exact_match_may_begin_after_a_mark() -> None:
    completions = texts("so\n#### 72", "#### 71\n#### 72", "72")
    golds: list[object] = ["a lot\n#### 72", "72", "72"]
    assert said(exact_match_reward(completions, solution=golds, after="####")) == [RIGHT, RIGHT, WRONG]


def test_any_of_several_gold_answers_will_do_and_none_is_not_applicable() -> None:
    golds: list[object] = [["NYC", "New York"], 42, None, "", [], {"a": 1}]
    completions = texts("New York", "42", "x", "", "x", "x")
    assert said(exact_match_reward(completions, answer=golds)) == [RIGHT, RIGHT] + [NOT_APPLICABLE] * 4


@pytest.mark.parametrize("reward", [exact_match_reward, numeric_match_reward, reasoning_accuracy_reward])
def test_without_a_column_of_gold_answers_nothing_can_be_said(reward: Any) -> None:
    with pytest.raises(CallError, match="needs the gold answers in a column 'solution' or 'answer'"):
        reward(texts("x"))


# Regular expressions


def test_a_pattern_is_searched_matched_or_matched_in_full() -> None:
    completions = texts("abc", "xabc", "abcx")
    assert said(regex_reward(completions, pattern="abc")) == [RIGHT, RIGHT, RIGHT]
    assert said(regex_reward(completions, pattern="abc", mode="match")) == [RIGHT, WRONG, RIGHT]
    assert said(regex_reward(completions, pattern="abc", mode="fullmatch")) == [RIGHT, WRONG, WRONG]


def test_an_invalid_pattern_of_a_row_is_not_applicable() -> None:
    rows: list[object] = ["a", None, "(", 3]
    assert said(regex_reward(texts("a", "a", "a", "a"), pattern=rows)) == [RIGHT] + [NOT_APPLICABLE] * 3


def test_an_endless_pattern_is_a_timeout_only_for_that_completion() -> None:
    completions = texts("a" * 60 + "b", "aaa", "b")
    assert said(regex_reward(completions, pattern="(a+)+$")) == [("timeout", None), RIGHT, WRONG]


def test_a_pattern_of_the_run_is_checked() -> None:
    assert check_pattern({"pattern": "a|b"}) is None
    assert str(check_pattern({"pattern": "("})).startswith("cannot use its pattern: missing )")


# JSON

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_json_meets_a_schema_or_does_not() -> None:
    completions = texts(
        '{"age": 3}', 'First\n```json\n{"age": "3"}\n```\nno:\n```json\n{"age": 3}\n```', '{"age": "3"}', "[]", "{", "",
        '{"age": NaN}', "[" * 100_000,
    )  # fmt: skip
    verdicts = json_schema_reward(completions, json_schema=PERSON)
    assert said(verdicts) == [RIGHT, RIGHT] + [WRONG] * 6
    assert verdicts[2].detail == "$.age: '3' is not of type 'integer'"
    assert verdicts[6].detail == "it is not JSON: NaN is not JSON"


def test_a_row_s_schema_may_be_text_and_an_invalid_schema_is_not_applicable() -> None:
    rows: list[object] = [PERSON, '{"type": "array"}', None, "{", {"type": "objekt"}, 3]
    completions = texts('{"age": 1}', '{"age": 1}', "1", "1", "1", "1")
    assert said(json_schema_reward(completions, json_schema=rows)) == [RIGHT, WRONG] + [NOT_APPLICABLE] * 4


def test_a_schema_refers_to_itself_and_to_nothing_elsewhere() -> None:
    within = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert said(json_schema_reward(texts("[1]", '["1"]'), json_schema=within)) == [RIGHT, WRONG]
    outside = {"$ref": "http://127.0.0.1:1/schema"}
    with pytest.raises(CallError, match="has a schema with a reference to something outside it"):
        json_schema_reward(texts("1"), json_schema=outside)
    verdicts = json_schema_reward(texts("1", "[1]"), json_schema=[outside, within])
    assert said(verdicts) == [NOT_APPLICABLE, RIGHT]
    assert verdicts[0].detail.startswith("the row's schema cannot be used: it refers to something outside it: ")


def test_a_schema_whose_pattern_has_no_end_is_a_timeout() -> None:
    schema = {"type": "string", "pattern": "(a+)+$"}
    assert said(json_schema_reward(texts(f'"{"a" * 60}b"', '"a"'), json_schema=schema)) == [("timeout", None), RIGHT]


def test_json_in_a_fence_is_found_beside_other_blocks_and_among_a_hundred_thousand_openings() -> None:
    beside = '```python\n[1]\n```\nso\n```json\n{"age": 3}\n```\nor\n```bash\nls\n```'
    assert said(json_schema_reward(texts(beside, "```json x\n" * 100_000), json_schema=PERSON)) == [RIGHT, WRONG]


def test_a_schema_that_cannot_be_followed_does_not_fail_the_completion() -> None:
    endless = {"$ref": "#"}
    assert said(json_schema_reward(texts("1"), json_schema=endless)) == [("error", None)]
    broken = {"properties": {"a": {"pattern": "("}}}
    assert said(json_schema_reward(texts('{"a": "x"}', "not JSON"), json_schema=broken)) == [NOT_APPLICABLE] * 2
    near = {"multipleOf": 0.5}
    assert said(json_schema_reward(texts("9" * 400, "1.5"), json_schema=near)) == [("error", None), RIGHT]
    huge = {"pattern": "a{99999999999999999999}"}
    assert said(json_schema_reward(texts('"x"'), json_schema=huge)) == [NOT_APPLICABLE]


def test_json_that_is_too_deep_for_its_recursive_schema_is_wrong_and_not_an_error() -> None:
    tree = {"type": "array", "items": {"$ref": "#"}}
    deep = texts("[" * 400 + "1" + "]" * 400, "[" * 400 + "]" * 400, "[" * 30 + "]" * 30, "[" * 30 + "1" + "]" * 30)
    verdicts = json_schema_reward(deep, json_schema=tree)
    assert said(verdicts) == [WRONG, WRONG, RIGHT, WRONG]
    assert verdicts[0].detail == "it is nested too deep for its schema"
    assert said(json_schema_reward(deep, json_schema={"type": "array"})) == [RIGHT] * 4
    assert said(json_schema_reward(texts("[[]]"), json_schema={"$ref": "#"})) == [("error", None)]


def test_a_schema_that_took_too_long_to_check_once_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_time_at_all(_seconds: float) -> Generator[None]:
        raise TimeIsUpError
        yield

    schema = {"type": "object", "title": "of this test alone"}
    with monkeypatch.context() as patched:
        patched.setattr(json_schema, "time_limit", no_time_at_all)
        assert said(json_schema_reward(texts("{}"), json_schema=schema)) == [("timeout", None)]
        assert (
            check_schema({"json_schema": schema})
            == "cannot use its json_schema: checking it took longer than 1 s of processor time"
        )
    assert said(json_schema_reward(texts("{}"), json_schema=schema)) == [RIGHT]


def test_a_schema_of_the_run_is_checked() -> None:
    assert check_schema({"json_schema": PERSON}) is None
    assert str(check_schema({"json_schema": {"type": "objekt"}})).startswith("cannot use its json_schema: $.type: ")


# Repetition, length, reasoning


def test_repeated_n_grams_are_punished_by_their_share() -> None:
    # [1,2,3,4]: 3 pairs, all distinct. [5]*5: 4 pairs, 1 distinct, so 3/4 repeated. [7]: shorter than a pair.
    ids = [[1, 2, 3, 4], [5] * 5, [7], []]
    completions = texts("a b c d", "a a A a a", "a", "")
    tokens = repetition_penalty_reward(completions, completion_ids=ids, ngram_size=2)
    words = repetition_penalty_reward(completions, ngram_size=2, max_penalty=-2.0, unit="words")
    assert tokens == [0.0, -0.75, 0.0, 0.0]
    assert words == [0.0, -1.5, 0.0, 0.0]
    with pytest.raises(CallError, match="needs 'completion_ids'"):
        repetition_penalty_reward(completions)


def test_the_length_that_is_punished_can_be_chosen() -> None:
    ids = [[0] * 50, [0] * 75, [0] * 100]
    assert soft_overlong_punishment_reward(ids, max_completion_length=100, soft_punish_cache=50) == [0.0, -0.5, -1.0]
    with pytest.raises(CallError, match="soft_punish_cache=101 is longer than max_completion_length=100"):
        soft_overlong_punishment_reward(ids, max_completion_length=100, soft_punish_cache=101)


def test_only_what_follows_the_reasoning_is_judged() -> None:
    completions = texts(
        r"<think>\boxed{2}</think> so \boxed{1}", r"<think>\boxed{1}</think> so \boxed{2}", r"\boxed{1}",
        r"<r>\boxed{2}</r></think> \boxed{1}",
    )  # fmt: skip
    golds: list[object] = ["1"] * 4
    assert said(reasoning_accuracy_reward(completions, solution=golds)) == [RIGHT, WRONG, WRONG, RIGHT]
    other = reasoning_accuracy_reward(completions, solution=golds, reasoning_delimiters=["</r>", "</think>"])
    assert said(other) == [RIGHT, WRONG, WRONG, RIGHT]


def test_a_gold_answer_that_does_not_parse_is_not_applicable_also_where_reasoning_does_not_end() -> None:
    completions = texts(r"</think> \boxed{1}", r"\boxed{1}")
    assert said(reasoning_accuracy_reward(completions, solution=["word", "word"])) == [NOT_APPLICABLE] * 2


# The limit itself


def test_a_time_limit_ends_with_its_block_and_leaves_an_outer_one_in_place() -> None:
    @contextmanager
    def outer() -> Generator[None]:
        with pytest.raises(TimeIsUpError), time_limit(0.2):
            yield

    with outer():
        with time_limit(50):
            pass
        while True:
            pass


def test_a_time_limit_counts_the_time_of_the_processor_and_not_of_the_clock() -> None:
    with time_limit(0.2):
        threading.Event().wait(0.6)


def test_a_time_limit_does_not_count_what_other_threads_use() -> None:
    """A reward function may have left one behind in the worker."""
    is_over = threading.Event()

    def burn() -> None:
        while not is_over.is_set():
            pass

    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with time_limit(0.3):
            threading.Event().wait(1.5)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_the_slow_completions_of_a_call_leave_its_deadline_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with 15 other busy processes, the clock passes 16 times as fast as processor time."""
    began_at_s = time.process_time()
    monkeypatch.setattr(time, "monotonic", lambda: 16 * (time.process_time() - began_at_s))
    slow, plain = "a" * 40 + "!", "b"
    verdicts = regex_reward(texts(*[slow + str(number) for number in range(15)], plain), pattern="(a+)+$|^b$")
    assert said(verdicts) == [("timeout", None)] * 15 + [RIGHT]
    assert time.monotonic() < 45, "in seconds on that machine's clock, instead of 240"


def test_a_time_limit_holds_also_where_its_first_signal_is_lost_in_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[object] = []

    def note(unraisable: "sys.UnraisableHookArgs") -> None:
        lost.append(unraisable.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", note)

    class Referent:
        """Something that goes away."""

    def burn(_: object) -> None:
        while True:
            pass

    def lose_one_and_go_on() -> None:
        referent = Referent()
        reference = weakref.ref(referent, burn)
        del referent
        burn(reference)

    with pytest.raises(TimeIsUpError), time_limit(0.2):
        lose_one_and_go_on()
    assert lost == [TimeIsUpError]
