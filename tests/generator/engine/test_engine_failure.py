"""The first failure in vLLM's processes is known here, while vLLM itself only reports that something failed."""

import logging
import logging.config
from collections.abc import Iterator

import pytest

from services.generator.engine import engine_failure

pytestmark = pytest.mark.unit

LOGGER = logging.getLogger("vllm.v1.engine.core")


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Listen to vLLM's loggers as its processes do, without the handlers of other engines in this process."""
    monkeypatch.delenv("HEADRACE_ENGINE_FAILURE_FILE", raising=False)
    monkeypatch.setattr(LOGGER, "filters", [])
    engine_failure.prepare()
    engine_failure.write_down_failures()
    engine_failure.write_down_failures()
    assert len(LOGGER.filters) == 1, "a failure is written once"
    yield
    engine_failure.clear_away()


def fail(message: str, *, what: str = "EngineCore failed to start.") -> None:
    try:
        raise ValueError(message)  # noqa: TRY301  it is to be logged
    except ValueError:
        LOGGER.exception(what)


def test_the_first_failure_is_the_root_cause_in_one_line() -> None:
    assert engine_failure.root_cause(otherwise="vLLM's own words") == "vLLM's own words"
    LOGGER.error("no exception, no cause")
    fail("a push that broke off", what="Invocation of %s method failed")
    fail("not enough memory\n for the cache")
    fail("a worker failed")
    assert engine_failure.root_cause(otherwise="vLLM's own words") == "ValueError: not enough memory for the cache"


def test_a_failure_is_heard_after_vllm_has_set_its_loggers_up_again() -> None:
    logging.config.dictConfig({"version": 1, "loggers": {"vllm": {}}, "disable_existing_loggers": False})
    fail("not enough memory")
    assert engine_failure.root_cause(otherwise="vLLM's own words") == "ValueError: not enough memory"


def test_the_next_engine_does_not_inherit_the_failures_of_the_previous_engine() -> None:
    fail("not enough memory")
    engine_failure.prepare()
    assert engine_failure.root_cause(otherwise="vLLM's own words") == "vLLM's own words"


@pytest.mark.parametrize(
    ("exit_codes", "sentence"),
    [
        ({"EngineCore": -9}, "its process EngineCore was killed by SIGKILL, as the kernel does when memory runs out"),
        ({"EngineCore_DP0": -15, "EngineCore_DP1": -11}, "its process EngineCore_DP1 was killed by SIGSEGV"),
        ({"EngineCore": -42}, "its process EngineCore was killed by signal 42"),
        ({"EngineCore_DP0": -15, "EngineCore_DP1": 1}, "its process EngineCore_DP1 ended with exit status 1"),
        ({}, ""),
    ],
)
def test_a_silent_engine_failure_is_reported_with_the_exit_of_its_process(
    exit_codes: dict[str, int], sentence: str
) -> None:
    assert engine_failure.how_ended(exit_codes).startswith(sentence)
