"""What /readyz tells everyone, and what an OpenAI route tells a client with a key."""

import pytest

from services.generator.service_state import ServiceState
from shared.lineage import NO_WEIGHTS, LineageVersion

pytestmark = pytest.mark.unit


class Holds:
    held_version = NO_WEIGHTS
    is_asleep = False


def test_readiness_is_an_engine_and_the_required_version() -> None:
    weights = Holds()
    state = ServiceState(weights)
    state.wait_for("no run to serve")
    assert state.why_not_ready() == "no run to serve"
    state.serve()
    assert state.why_not_ready() == "waiting for weights"
    weights.held_version = LineageVersion(1, 3)
    assert state.why_not_ready() is None
    state.required_version = LineageVersion(1, 5)
    assert state.why_not_ready() == "waiting for weights"
    weights.held_version = LineageVersion(2, 4)
    assert state.why_not_ready() is None, "a newer lineage is newer, whatever the number"
    weights.held_version, state.required_version = LineageVersion(1, 9), LineageVersion(2, 4)
    assert state.why_not_ready() == "waiting for weights"


def test_a_policy_that_lags_behind_still_answers_and_one_without_weights_does_not() -> None:
    weights = Holds()
    state = ServiceState(weights)
    state.serve()
    assert state.why_policy_closed() == "waiting for weights: none received yet, policy version 0 is required"
    weights.held_version, state.required_version = LineageVersion(1, 3), LineageVersion(1, 5)
    assert state.why_policy_closed() is None
    state.wait_for("loading the model")
    assert state.why_policy_closed() == "loading the model"


def test_a_sleeping_engine_is_not_ready_and_refuses_requests_at_once() -> None:
    weights = Holds()
    weights.held_version, weights.is_asleep = LineageVersion(1, 3), True
    state = ServiceState(weights)
    state.serve()
    assert state.why_not_ready() == "asleep until the next weights"
    assert state.why_policy_closed() == "asleep until the next weights: the trainer uses its GPU memory"
    weights.is_asleep = False
    assert (state.why_not_ready(), state.why_policy_closed()) == (None, None)


def test_the_reason_why_a_model_cannot_be_loaded_is_shown_only_with_a_key() -> None:
    state = ServiceState(Holds())
    state.wait_for("this run's model cannot be loaded", detail="/models/secret has no config.json")
    assert state.why_not_ready() == "this run's model cannot be loaded"
    assert state.why_policy_closed() == "this run's model cannot be loaded: /models/secret has no config.json"
    state.wait_for("no run to serve")
    assert state.why_policy_closed() == "no run to serve"
