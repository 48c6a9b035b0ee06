"""Compares the mathematical answer that follows a completion's reasoning with the gold answer.

It follows TRL's ``reasoning_accuracy_reward``. The first listed delimiter that occurs in the completion is used, and
the answer is the text after its last occurrence. A completion whose reasoning does not end gets 0.0. As in
accuracy_reward, a gold answer that does not parse is not applicable, even if the reasoning does not end.
"""

from services.rewarder.built_ins.accuracy import accuracy_reward, without_answer
from services.rewarder.built_ins.gold_answers import gold_answers
from services.rewarder.reward_call import Verdict, text_of
from shared.messages import Completion

DELIMITERS = ("</think>",)


def reasoning_accuracy_reward(
    completions: list[Completion],
    solution: list[object] | None = None,
    answer: list[object] | None = None,
    reasoning_delimiters: list[str] | None = None,
    **_columns: object,
) -> list[Verdict]:
    """Score each completion: 1.0 if its LaTeX answer after the reasoning equals the gold answer, 0.0 if not."""
    golds = gold_answers(solution, answer)
    answers = [_after_reasoning(text_of(completion), reasoning_delimiters or DELIMITERS) for completion in completions]
    finished = [index for index, text in enumerate(answers) if text is not None]
    texts: list[Completion] = [answers[index] or "" for index in finished]
    judged = accuracy_reward(texts, solution=[golds[index] for index in finished])
    by_index = dict(zip(finished, judged, strict=True))
    return [
        by_index[index] if index in by_index else without_answer(gold, "the reasoning does not end")
        for index, gold in enumerate(golds)
    ]


def _after_reasoning(text: str, delimiters: list[str] | tuple[str, ...]) -> str | None:
    found = next((delimiter for delimiter in delimiters if delimiter in text), None)
    return None if found is None else text.rpartition(found)[2]
