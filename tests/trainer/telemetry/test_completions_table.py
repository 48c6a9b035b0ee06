"""The table of completions: one row for each, without characters that move a terminal's cursor."""

import dataclasses

import msgspec
import numpy as np
import pytest

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.telemetry.completions_table import completions_table, conversation_text, rendered
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.messages import Completion, RewardOutcome
from tests.groups import scored_group

pytestmark = pytest.mark.unit


def group(number: int, *, prompt: str = "abc", completion: Completion = "42") -> TrainedGroup:
    scored = scored_group(f"{number:08d}", rewards=[0.25, 1.0])
    failed = RewardOutcome("pkg.mod:style", "timeout", None, 1.0)
    rollouts = tuple(
        msgspec.structs.replace(rollout, completion=completion, rewards=(*rollout.rewards, failed))
        for rollout in scored.rollouts
    )
    scored = msgspec.structs.replace(
        scored, prompt=msgspec.structs.replace(scored.prompt, prompt=prompt), rollouts=rollouts
    )
    return TrainedGroup(WaitingGroup(number, scored, 0), np.array([0.25, 1.0]), np.array([-1.5, 1.5]), has_signal=True)


def test_there_is_a_row_a_completion_with_what_every_function_said() -> None:
    table = completions_table([group(0)], step=7)
    assert table.columns == ("step", "prompt", "completion", "exact", "style", "advantage")
    assert table.rows == ((7, "abc", "42", 0.25, None, -1.5), (7, "abc", "42", 1.0, None, 1.5))


def test_components_and_versions_have_columns_if_functions_report_them() -> None:
    entered = group(0)
    (exact, style), (plain, other) = (rollout.rewards for rollout in entered.waiting.group.rollouts)
    told = msgspec.structs.replace(exact, components={"format": 0.5, "answer": 0.0}, version="3f2a")
    newer = msgspec.structs.replace(plain, components={"answer": 1.0}, version="9c1b")
    first, second = entered.waiting.group.rollouts
    rollouts = (
        msgspec.structs.replace(first, rewards=(told, style)),
        msgspec.structs.replace(second, rewards=(newer, other)),
    )
    scored = msgspec.structs.replace(entered.waiting.group, rollouts=rollouts)
    table = completions_table([dataclasses.replace(entered, waiting=WaitingGroup(0, scored, 0))], step=7)
    assert table.columns[3:] == ("exact", "style", "advantage", "exact/format", "exact/answer", "exact/version")
    assert [row[3:] for row in table.rows] == [
        (0.25, None, -1.5, 0.5, 0.0, "3f2a"),
        (1.0, None, 1.5, None, 1.0, "9c1b"),
    ]
    drawn = rendered(table, step=7)
    assert "exact/format" in drawn
    assert "exact: version 3f2a, 9c1b" in drawn
    assert "exact/version" not in drawn


def test_values_of_log_extra_have_columns_behind_the_advantage() -> None:
    entered = group(0)
    first, second = entered.waiting.group.rollouts
    exact, style = first.rewards
    logged = msgspec.structs.replace(exact, extra={"parsed": "5", "half": 2.5})
    rollouts = (msgspec.structs.replace(first, rewards=(logged, style)), second)
    scored = msgspec.structs.replace(entered.waiting.group, rollouts=rollouts)
    table = completions_table([dataclasses.replace(entered, waiting=WaitingGroup(0, scored, 0))], step=7)
    assert table.columns[5:] == ("advantage", "parsed", "half")
    assert [row[5:] for row in table.rows] == [(-1.5, "5", 2.5), (1.5, None, None)]


def test_a_reward_that_a_group_does_not_have_is_empty_there() -> None:
    entered = group(1)
    others = tuple(
        msgspec.structs.replace(it, rewards=(it.rewards[0], RewardOutcome("envs:Go", "scored", 0.5, 1.0)))
        for it in entered.waiting.group.rollouts
    )
    scored = msgspec.structs.replace(entered.waiting.group, rollouts=others)
    table = completions_table([group(0), dataclasses.replace(entered, waiting=WaitingGroup(1, scored, 0))], step=7)
    assert table.columns == ("step", "prompt", "completion", "exact", "style", "Go", "advantage")
    assert [row[3:6] for row in table.rows] == [
        (0.25, None, None),
        (1.0, None, None),
        (0.25, None, 0.5),
        (1.0, None, 0.5),
    ]


def test_unique_prompts_keep_the_first_completion_of_each() -> None:
    groups = [group(0, prompt="a"), group(1, prompt="b"), group(2, prompt="a")]
    table = completions_table(groups, step=7, unique_prompts=True)
    assert [(row[1], row[3]) for row in table.rows] == [("a", 0.25), ("b", 0.25)]


def test_the_drawn_table_has_two_decimals_and_a_dash_for_what_has_no_value() -> None:
    drawn = rendered(completions_table([group(0, completion="forty-two")], step=7), step=7)
    assert "Step 7" in drawn
    (row,) = [line for line in drawn.splitlines() if "-1.50" in line]
    assert row.replace("│", " ").split() == ["abc", "forty-two", "0.25", "-", "-1.50"]


def test_as_many_rows_are_drawn_as_wanted_and_the_same_ones_each_time() -> None:
    table = completions_table([group(number, prompt=f"prompt{number}") for number in range(20)], step=7)
    drawn = rendered(table, step=7, num_rows=3)
    assert drawn.count("prompt") == 3
    assert rendered(table, step=7, num_rows=3) == drawn
    assert rendered(table, step=8, num_rows=3) != drawn
    assert rendered(table, step=7, num_rows=40).count("prompt") == 40


def test_text_of_the_model_can_neither_move_the_cursor_nor_become_markup() -> None:
    drawn = rendered(completions_table([group(0, completion="\x1b[2Jgone [bold]not[/bold]")], step=1), step=1)
    assert "\x1b" not in drawn
    assert "�[2Jgone [bold]not[/bold]" in drawn


def test_a_completion_of_messages_is_printed_with_its_tool_calls() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    said: Completion = [call, {"role": "tool", "content": "42"}]
    table = completions_table([group(0, completion=said)], step=7)
    assert table.rows[0][2] == "ASSISTANT\nadd({})\n\nTOOL\n42"


def test_a_conversation_is_printed_with_its_roles() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    assert conversation_text(prompt) == "SYSTEM\nBe brief.\n\nUSER\n6 x 7?"
