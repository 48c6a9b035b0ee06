"""An answer is decoded only if its tokens, logprobs and version spans fit together."""

from typing import Any

import msgspec
import pytest

from shared.arrays import pack_ids, pack_logprobs
from shared.errors import MessageError
from shared.messages import VersionSpan
from shared.turns import SampledTurn, TurnAnswer, TurnRefusal, decode_turn_answer, encode_turn_answers

pytestmark = pytest.mark.unit

TURN = SampledTurn(
    appended_ids=pack_ids([1, 2]),
    token_ids=pack_ids([3, 4, 5]),
    logprobs=pack_logprobs([-0.5, -0.5, -0.5]),
    version_spans=(VersionSpan(7, 0, 2), VersionSpan(8, 2, 3)),
    finish_reason="stop",
    message={"role": "assistant", "content": "2"},
    started_at_s=1.0,
    ended_at_s=2.0,
)


def test_answers_arrive_as_they_were_sent() -> None:
    answers = [TurnAnswer(1, turn=TURN), TurnAnswer(0, refusal=TurnRefusal("context_length", "a\nlong line"))]
    lines = encode_turn_answers(answers)
    assert [decode_turn_answer(line) for line in lines.splitlines()] == answers


@pytest.mark.parametrize("parts", [{}, {"turn": TURN, "refusal": TurnRefusal("sampling", "")}])
def test_an_answer_is_either_a_turn_or_a_refusal(parts: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="either a turn or a refusal"):
        decode_turn_answer(encode_turn_answers([TurnAnswer(0, **parts)]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"appended_ids": b"123"}, "3 bytes of appended ids"),
        ({"token_ids": b"12345", "logprobs": b"12345"}, "5 of sampled ids"),
        ({"logprobs": pack_logprobs([-0.5])}, "12 of sampled ids and 4 of logprobs"),
        ({"token_ids": pack_ids([3, -4, 5])}, "negative token id"),
        ({"appended_ids": pack_ids([-1])}, "negative token id"),
        ({"version_spans": ()}, "do not tile its 3 tokens"),
        ({"version_spans": (VersionSpan(7, 0, 2),)}, "do not tile its 3 tokens"),
        ({"version_spans": (VersionSpan(7, 0, 4),)}, "do not tile its 3 tokens"),
        ({"version_spans": (VersionSpan(7, 1, 3),)}, "do not tile its 3 tokens"),
        ({"version_spans": (VersionSpan(7, 0, 0), VersionSpan(7, 0, 3))}, "do not tile its 3 tokens"),
        ({"version_spans": (VersionSpan(7, 0, 3), VersionSpan(8, 3, 2), VersionSpan(9, 2, 3))}, "do not tile"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode_turn_answer(encode_turn_answers([TurnAnswer(0, turn=msgspec.structs.replace(TURN, **changes))]))
