"""Every gold solution of GSM8K is right for its own row and wrong for the next, in the workers that score runs."""

import asyncio
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from services.rewarder.reward_call import RewardCall
from services.rewarder.scoring import Scorer, WeightedFunction

ROWS_A_CALL = 100


def number_of(solution: str) -> int:
    return int(solution.rpartition("####")[2].strip().replace(",", ""))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_all_gold_solutions_are_right_for_their_row_and_wrong_for_the_next(scorer: Scorer) -> None:
    file = os.environ.get("GSM8K_JSONL")
    if not file:
        pytest.skip("set GSM8K_JSONL to a .jsonl file of GSM8K; all that lie beside it are judged")
    lines = [line for path in sorted(Path(file).parent.glob("*.jsonl")) for line in path.read_text().splitlines()]
    solutions: list[str] = [json.loads(line)["answer"] for line in lines]
    assert len(solutions) >= 2
    others = [another_answer(solutions, index) for index in range(len(solutions))]

    async def judge(completions: list[str], golds: list[str]) -> list[tuple[float | None, ...]]:
        call = RewardCall(["p"] * len(golds), list(completions), {"answer": list(golds)})
        names = [WeightedFunction("accuracy_reward"), WeightedFunction("numeric_match_reward")]
        rows = await scorer.score(call, names, timeout_s=300, lane="test")
        return [tuple(outcome.value for outcome in row) for row in rows]

    async def judge_all(golds: list[str]) -> Counter[tuple[float | None, ...]]:
        parts = [slice(start, start + ROWS_A_CALL) for start in range(0, len(solutions), ROWS_A_CALL)]
        judged = await asyncio.gather(*(judge(solutions[part], golds[part]) for part in parts))
        return Counter(values for part in judged for values in part)

    assert await judge_all(solutions) == {(1.0, 1.0): len(solutions)}
    assert await judge_all(others) == {(0.0, 0.0): len(solutions)}


def another_answer(solutions: list[str], index: int) -> str:
    """Return the gold answer of the next row with a different answer."""
    following = (solutions[(index + distance) % len(solutions)] for distance in range(1, len(solutions)))
    return next(solution for solution in following if number_of(solution) != number_of(solutions[index]))
