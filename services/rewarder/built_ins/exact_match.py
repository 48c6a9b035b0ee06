"""Compares a completion with the gold answer as text."""

from services.rewarder.built_ins.gold_answers import MISSING, gold_answers
from services.rewarder.reward_call import Verdict, text_of
from shared.messages import Completion


def exact_match_reward(
    completions: list[Completion],
    solution: list[object] | None = None,
    answer: list[object] | None = None,
    after: str | None = None,
    ignore_case: bool = False,
    **_columns: object,
) -> list[Verdict]:
    """Score each completion: 1.0 if it equals the gold answer, apart from surrounding white space, 0.0 if not.

    With ``after``, only the text behind the last occurrence of ``after`` is compared, in the completion and in a gold
    answer that has it; a completion without it gets 0.0. If the gold answer is a list, a match with any element counts.
    """
    golds = gold_answers(solution, answer)
    return [
        _judge(text_of(completion), gold, after=after, ignore_case=ignore_case)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _judge(text: str, gold: object, *, after: str | None, ignore_case: bool) -> Verdict:
    accepted = {
        _comparable(one, after=after, ignore_case=ignore_case)
        for one in (gold if isinstance(gold, list) else [gold])  # pyright: ignore[reportUnknownVariableType]
        if isinstance(one, str | int | float)
    } - {""}
    if not accepted:
        return MISSING
    if after is not None and after not in text:
        return Verdict("scored", 0.0, "it does not have the text that 'after' names")
    return Verdict("scored", float(_comparable(text, after=after, ignore_case=ignore_case) in accepted))


def _comparable(value: str | float, *, after: str | None, ignore_case: bool) -> str:
    text = str(value)
    if after is not None:
        text = text.rpartition(after)[2]
    return text.strip().casefold() if ignore_case else text.strip()
