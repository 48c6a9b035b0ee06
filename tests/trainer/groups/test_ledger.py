"""The ledger's guarantee: a group is trained once or dropped with a reason, never both and never twice."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.groups.ledger import DEAD_LETTER, Ledger
from shared.errors import HeadraceError

pytestmark = pytest.mark.unit


def test_a_trained_group_cannot_be_dropped_afterwards() -> None:
    ledger = Ledger(admitted=1)
    ledger.record_trained(0)
    ledger.record_dropped(0, DEAD_LETTER)
    assert ledger.num_dropped == 0
    assert ledger.is_settled(0)


def test_a_replayed_dead_letter_is_in_flight_again_and_nothing_else_is() -> None:
    ledger = Ledger(admitted=2)
    ledger.record_dropped(0, DEAD_LETTER)
    ledger.record_dropped(1, "stale")
    assert ledger.revive(0)
    assert not ledger.revive(1)
    assert ledger.in_flight() == [0]


def test_runs_of_numbers_are_stored_as_first_and_last() -> None:
    ledger = Ledger(admitted=8)
    for number in (0, 1, 2, 5, 7):
        ledger.record_trained(number)
    assert ledger.to_json() == {"admitted": 8, "trained": [[0, 2], [5, 5], [7, 7]], "dropped": {}}


@given(st.dictionaries(st.integers(0, 60), st.sampled_from(["trained", "stale", "zero_std", DEAD_LETTER])))
def test_a_ledger_survives_its_checkpoint(outcomes: dict[int, str]) -> None:
    ledger = Ledger(admitted=61)
    for number, outcome in outcomes.items():
        if outcome == "trained":
            ledger.record_trained(number)
        else:
            ledger.record_dropped(number, outcome)
    restored = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert restored.in_flight() == ledger.in_flight() == sorted(set(range(61)) - set(outcomes))
    assert restored.dropped_by_reason() == ledger.dropped_by_reason()
    assert restored.num_trained == sum(outcome == "trained" for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ({"admitted": 5, "trained": [[0, 5]], "dropped": {}}, "groups 0 to 5 of 5 admitted"),
        ({"admitted": 5, "trained": [[0, 2]], "dropped": {"stale": [[2, 3]]}}, "groups 2 to 3 of 5 admitted"),
        ({"admitted": 5, "trained": [[3, 1]], "dropped": {}}, "groups 3 to 1 of 5 admitted"),
        ({"admitted": 5, "trained": [[-2, 1]], "dropped": {}}, "cannot be read"),
        ({"admitted": -1, "trained": [], "dropped": {}}, "cannot be read"),
        ({"admitted": 2**53, "trained": [[0, 2**52]], "dropped": {}}, "9007199254740992 admitted groups"),
        ({"admitted": 5, "trained": [[0, 1, 2]], "dropped": {}}, "cannot be read"),
        ({"admitted": 5, "trained": "x", "dropped": {}}, "cannot be read"),
        ({"admitted": 5}, "cannot be read"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(kept: dict[str, Any], reason: str) -> None:
    with pytest.raises(HeadraceError, match=reason):
        Ledger.from_json(kept)
