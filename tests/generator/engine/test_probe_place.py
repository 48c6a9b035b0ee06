"""The place in an engine's batch that is reserved for probes."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.generator.engine.engine_config import num_places, reserve_place

pytestmark = pytest.mark.unit


def a_scheduler_config(**changes: Any) -> Any:
    """Return the relevant fields of vLLM's SchedulerConfig."""
    fields = {
        "max_num_seqs": 64,
        "max_num_active_seqs": None,
        "max_num_batched_tokens": 2048,
        "scheduler_cls": None,
        "async_scheduling": True,
    }
    return SimpleNamespace(**fields | changes)


def test_requests_have_the_places_they_would_have_and_the_probe_one_more() -> None:
    config = a_scheduler_config()
    assert num_places(config) == 64
    reserve_place(config)
    assert (config.max_num_seqs, config.max_num_active_seqs, num_places(config)) == (65, 64, 64)
    assert config.max_num_batched_tokens == 2048


@pytest.mark.parametrize(("is_async", "name"), [(True, "AsyncProbeScheduler"), (False, "ProbeScheduler")])
def test_the_scheduler_is_of_the_kind_that_vllm_chose(is_async: bool, name: str) -> None:
    config = a_scheduler_config(async_scheduling=is_async)
    reserve_place(config)
    assert config.scheduler_cls == f"services.generator.engine.probe_scheduler.{name}"


def test_a_step_has_a_token_for_every_place() -> None:
    config = a_scheduler_config(max_num_batched_tokens=64)
    reserve_place(config)
    assert config.max_num_batched_tokens == 65


def test_a_place_that_is_free_anyway_is_enough() -> None:
    config = a_scheduler_config(max_num_active_seqs=10)
    reserve_place(config)
    assert (config.max_num_seqs, num_places(config)) == (64, 10)


def test_an_operators_own_scheduler_is_left_as_it_is() -> None:
    config = a_scheduler_config(scheduler_cls="theirs.Scheduler")
    reserve_place(config)
    assert (config.max_num_seqs, config.scheduler_cls) == (64, "theirs.Scheduler")
