"""A log event is one line with its run and group, as JSON or as text."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from shared.errors import UserError
from shared.service.logs import (
    LogFormat,
    about,
    about_run,
    configure_first_logging,
    configure_logging,
    last_message,
    log_lines,
    message_of,
)
from shared.settings import ServiceSettings

pytestmark = pytest.mark.unit

log = logging.getLogger("services.somewhere")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, level_of_httpx = root.handlers[:], root.level, logging.getLogger("httpx").level
    yield
    about_run("")
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("httpx").setLevel(level_of_httpx)


def logged(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    (line,) = capsys.readouterr().err.splitlines()
    event: dict[str, str] = json.loads(line)
    return event


def test_each_error_of_the_settings_is_one_log_line_in_the_requested_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = UserError("HEADRACE_PORT: many\nHEADRACE_HOST: none")
    for environment in ({}, {"HEADRACE_LOG_FORMAT": "xml"}):
        configure_first_logging(environment)
        log_lines(log, wrong)
        said = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
        assert said == ["HEADRACE_PORT: many", "HEADRACE_HOST: none"]
    configure_first_logging({"HEADRACE_LOG_FORMAT": "text"})
    log_lines(log, wrong)
    first, _ = capsys.readouterr().err.splitlines()
    assert first.endswith(" CRITICAL services.somewhere HEADRACE_PORT: many")


def test_the_reason_for_the_end_of_a_process_is_logged_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("CRITICAL")
    log_lines(log, UserError("there is no GPU"))
    assert logged(capsys)["message"] == "there is no GPU"


def test_an_event_is_one_line_of_json_with_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    log.info('two lines\nand a "quote"')
    event = logged(capsys)
    assert event.keys() == {"at", "level", "logger", "message"}
    assert event["message"] == 'two lines\nand a "quote"'
    assert (event["level"], event["logger"]) == ("INFO", "services.somewhere")


def test_an_event_names_the_run_and_the_group_that_its_task_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")

    async def score(group_id: str) -> None:
        with about(group_id=group_id):
            await asyncio.sleep(0)
            log.info("scored")

    async def serve(run_id: str) -> None:
        with about(run_id=run_id):
            await asyncio.gather(score("00000001"), score("00000002"))
            log.info("done")

    async def serve_two() -> None:
        await asyncio.gather(serve("run-a"), serve("run-b"))

    asyncio.run(serve_two())
    log.info("nothing in particular")
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert sorted((event["message"], event.get("run_id"), event.get("group_id", "")) for event in events[:-1]) == [
        ("done", "run-a", ""),
        ("done", "run-b", ""),
        ("scored", "run-a", "00000001"),
        ("scored", "run-a", "00000002"),
        ("scored", "run-b", "00000001"),
        ("scored", "run-b", "00000002"),
    ]
    assert not events[-1].keys() & {"run_id", "group_id"}


def test_a_process_of_one_run_names_it_in_every_thread_until_it_has_another(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    about_run("run-a")
    thread = threading.Thread(target=lambda: log.info("from a thread"))
    thread.start()
    thread.join()
    assert logged(capsys)["run_id"] == "run-a"
    log.info("another", extra={"run_id": "run-b", "group_id": "00000007"})
    event = logged(capsys)
    assert (event["run_id"], event["group_id"]) == ("run-b", "00000007")
    about_run("")
    log.info("idle")
    assert "run_id" not in logged(capsys)


def test_text_is_for_people_and_has_the_trace_below(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", log_format="text")
    with about(run_id="run-a", group_id="00000042"):
        try:
            int("luck")
        except ValueError:
            log.exception("the group failed")
    head, *trace = capsys.readouterr().err.splitlines()
    assert head.endswith("Z ERROR services.somewhere [run-a 00000042] the group failed")
    assert trace[-1] == "    ValueError: invalid literal for int() with base 10: 'luck'"
    assert all(line.startswith("    ") for line in trace)
    log.info("nothing in particular")
    assert capsys.readouterr().err.endswith("Z INFO services.somewhere nothing in particular\n")


@pytest.mark.parametrize("newline", ["\n", "\r", "\r\n", "\x0b", "\u2028"])
def test_no_message_can_pass_for_a_separate_event(capsys: pytest.CaptureFixture[str], newline: str) -> None:
    configure_logging("info", log_format="text")
    said = f"one{newline}2026-01-01T00:00:00.000Z CRITICAL services.trainer the disk is full"
    log.error("scoring failed: %s", said, exc_info=ValueError(said))
    head, *below = capsys.readouterr().err.splitlines()
    assert head.endswith("Z ERROR services.somewhere scoring failed: one")
    assert sum(line.strip().startswith("2026-01-01T") for line in below) == 2, "in the message, and in the trace"
    assert all(line.startswith("    ") for line in below)


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_requested_stack_is_logged(capsys: pytest.CaptureFixture[str], log_format: LogFormat) -> None:
    configure_logging("info", log_format=log_format)
    log.info("here", stack_info=True)
    assert "test_a_requested_stack_is_logged" in capsys.readouterr().err


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_message_that_begins_with_a_bracket_is_quoted_whole(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    configure_logging("info", log_format=log_format)
    log.warning("[error] 79")
    with about(group_id="00000042"):
        log.warning("[error] 80")
    assert [message_of(line) for line in capsys.readouterr().err.splitlines()] == ["[error] 79", "[error] 80"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_quote_of_a_log_is_its_sentence_in_both_formats(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    configure_logging("info", log_format=log_format)
    with about(run_id="run-a"):
        log.warning("the GPU is gone: [error] 79")
    assert message_of(capsys.readouterr().err) == "the GPU is gone: [error] 79"


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("logger", ["headrace.access", "headrace.audit"])
def test_a_line_about_a_request_says_nothing_of_why_a_process_ended(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, logger: str
) -> None:
    configure_logging("info", log_format=log_format)
    logging.getLogger(logger).info("GET /livez 200")
    assert message_of(capsys.readouterr().err) == ""


@pytest.mark.parametrize("line", ["Killed", '{"no": "message"}', "[1, 2]", "2026 was a good year"])
def test_a_line_of_anybody_else_is_quoted_as_it_is(line: str) -> None:
    assert message_of(f"{line}\n") == line


@pytest.mark.parametrize("process", ["", "(EngineCore pid=7) "])
def test_a_late_warning_of_multiprocessing_is_not_taken_for_the_last_words_of_a_process(process: str) -> None:
    lines = [
        '{"message": "serving", "level": "INFO"}',
        '{"message": "vLLM\'s engine died: ValueError: no room in x.py:12: UserWarning: y", "level": "CRITICAL"}',
        f"{process}/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There "
        "appear to be 1 leaked semaphore objects to clean up at shutdown",
        f"{process}  warnings.warn('resource_tracker: There appear to be %d '",
    ]
    assert last_message(lines) == "vLLM's engine died: ValueError: no room in x.py:12: UserWarning: y"
    assert last_message([*lines, "terminate called without an active exception"]).startswith("terminate called")
    assert last_message(lines[2:]) == ""


def test_the_format_is_a_setting_of_every_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServiceSettings().log_format == "json"
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "text")
    assert ServiceSettings().log_format == "text"
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "xml")
    with pytest.raises(ValueError, match="'json' or 'text'"):
        ServiceSettings()
