"""Which recorded turns count as sampled again."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.chaos.judge import Verdict, judge_turns
from benchmarks.chaos.turns import Recorded, Sampled, Turn, TurnCounts, TurnWatch, count_turns, read_journal, turns_of

pytestmark = pytest.mark.unit

G = 4


def turn(branch: int = 0, number: int = 0, *, group: str = "00000001") -> Turn:
    return Turn("run-a", group, branch, number)


def again(*sampled: Sampled, recorded: list[Recorded]) -> int:
    return len(count_turns(sampled, recorded, num_generations=G).again)


def test_a_turn_that_begins_while_it_is_recorded_is_sampled_again() -> None:
    found = count_turns(
        [Sampled(turn(2, 1), 1, began_at_s=11.0, by="sim-000")], [Recorded(turn(2, 1), 10.0, 12.0)], num_generations=G
    )
    assert found == TurnCounts(1, 1, ("turn 1 of rollout 00000001-2, by sim-000",))


@pytest.mark.parametrize(
    "recorded",
    [
        Recorded(turn(0, 1), 10.5, 12.0),  # sampled before it was recorded
        Recorded(turn(0, 1), 5.0, 9.0),  # the recording was lost or deleted before
        Recorded(turn(0, 0), 5.0, 12.0),  # the turn before it
        Recorded(turn(1, 1), 5.0, 12.0),  # the same turn of another rollout
        Recorded(turn(0, 1, group="00000002"), 5.0, 12.0),
    ],
)
def test_a_turn_that_was_not_recorded_when_it_began_is_not(recorded: Recorded) -> None:
    assert again(Sampled(turn(0, 1), 1, began_at_s=10.0), recorded=[recorded]) == 0


def test_a_request_for_equal_turns_counts_those_that_were_recorded() -> None:
    recorded = [Recorded(turn(0), 1.0, 9.0), Recorded(turn(3), 1.0, 9.0)]
    assert again(Sampled(turn(1), 2, began_at_s=5.0), recorded=recorded) == 0
    assert again(Sampled(turn(1), 3, began_at_s=5.0), recorded=recorded) == 1
    assert again(Sampled(turn(0), 4, began_at_s=5.0), recorded=recorded) == 2


def test_a_request_may_have_the_turns_of_another_group_with_the_same_prompt() -> None:
    recorded = [Recorded(turn(0), 1.0, 9.0)]
    assert again(Sampled(turn(1), 3 + G, began_at_s=5.0), recorded=recorded) == 0
    assert again(Sampled(turn(1), 4 + G, began_at_s=5.0), recorded=recorded) == 1


def test_turns_sampled_again_are_a_broken_promise() -> None:
    verdict = Verdict("run-a", "finished")
    judge_turns(TurnCounts(9, 8, ("turn 1 of rollout 00000001-2, by sim-000",)), verdict)
    assert (verdict.turns_sampled, verdict.turns_recorded, verdict.turns_sampled_twice) == (9, 8, 1)
    assert verdict.broken == ["1 recorded turns were sampled again: turn 1 of rollout 00000001-2, by sim-000"]


def test_a_journal_has_the_requests_of_a_run(tmp_path: Path) -> None:
    line = {"run": "run-a", "request": "00000001-2-a1b2c3d4", "turn": 1, "by": "sim-000", "began_at_s": 7.5}
    lines = [line, line, line | {"run": "run-b"}, line | {"request": "eval-00000003-0-00000000", "turn": 0}]
    journal = tmp_path / "turns.jsonl"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"run": "run-a", "requ')
    assert read_journal(journal, "run-a") == [
        Sampled(turn(2, 1), 2, 7.5, "sim-000"),
        Sampled(turn(0, 0, group="eval-00000003"), 1, 7.5, "sim-000"),
    ]
    assert read_journal(tmp_path / "none", "run-a") == []


def entry(kind: str, started_at_s: float = 0.0) -> bytes:
    return msgspec.msgpack.encode({"type": kind, "turn": {"started_at_s": started_at_s} if kind == "turn" else 0})


def test_the_turns_under_a_key_are_numbered_without_the_results_of_tools() -> None:
    entries = {
        b"0/10": entry("turn", 4.0),
        b"0/0": entry("turn", 1.0),
        b"0/1": entry("tools"),
        b"1/0": entry("turn", 2.0),
    }
    found = list(turns_of("headrace:{run-a}:sessions:00000001", entries))
    assert found == [(turn(0, 0), 1.0), (turn(0, 1), 4.0), (turn(1, 0), 2.0)]


def test_a_recording_is_there_from_the_first_look_that_found_it_to_the_last() -> None:
    watch, key = TurnWatch(lambda: ""), "headrace:{run-a}:sessions:00000001"
    watch.note(key, {b"0/0": entry("turn", 1.0)}, asked_at_s=5.0, answered_at_s=5.2)
    assert watch.recorded("run-a") == [Recorded(turn(), 5.2, 5.2)]
    watch.note(key, {b"0/0": entry("turn", 1.0)}, asked_at_s=6.0, answered_at_s=6.2)
    assert watch.recorded("run-a") == [Recorded(turn(), 5.2, 6.0)]
    # the group was withdrawn, and admitted again
    watch.note(key, {b"0/0": entry("turn", 8.0)}, asked_at_s=9.0, answered_at_s=9.2)
    assert watch.recorded("run-a") == [Recorded(turn(), 5.2, 6.0), Recorded(turn(), 9.2, 9.2)]
    assert watch.recorded("run-b") == []
