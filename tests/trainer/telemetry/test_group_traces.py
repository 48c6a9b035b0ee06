"""The timestamps of a settled group become one trace with a span per stage, if a collector is set."""

import gzip
import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.telemetry.group_traces import GroupTraces
from shared.install_commands import install_extras
from shared.messages import Stamp
from shared.redis.redis_connection import Redis
from tests.groups import scored_group
from tests.trainer.incarnations import create, small_config, train
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices

SECOND = 1_000_000_000


def waiting(number: int, *stamps: Stamp) -> WaitingGroup:
    group = msgspec.structs.replace(scored_group(f"{number:08d}", policy_version=3), stamps=stamps)
    return WaitingGroup(number, group, 3)


LIFE = (
    Stamp("claimed", 2.0, "generator-0"),
    Stamp("generated", 5.0, "generator-0"),
    Stamp("scored", 6.5, "rewarder-1"),
)


class Told:
    """Traces, and the resulting spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = GroupTraces.through(SimpleSpanProcessor(self._exporter), run_id="run-a", replica_id="trainer-0")

    def spans(self) -> dict[str, ReadableSpan]:
        found = {span.name: span for span in self._exporter.get_finished_spans()}
        assert len(found) == len(self._exporter.get_finished_spans())
        return found


def test_the_stamps_of_a_trained_group_are_the_spans_of_its_trace() -> None:
    told = Told()
    told.traces.trained([waiting(7, *LIFE)], step=4)
    assert told.spans() == {}, "nothing is sent before a checkpoint contains the group"
    told.traces.settled(["00000007"])
    spans = told.spans()
    assert spans.keys() == {"prompt group", "queue", "generate", "score", "train", "checkpoint"}
    whole = spans["prompt group"]
    assert whole.start_time == 1 * SECOND
    assert [(spans[name].start_time, spans[name].end_time) for name in ("queue", "generate", "score")] == [
        (1 * SECOND, 2 * SECOND),
        (2 * SECOND, 5 * SECOND),
        (5 * SECOND, 6.5 * SECOND),
    ]
    assert spans["train"].end_time == spans["checkpoint"].start_time
    assert spans["checkpoint"].end_time == whole.end_time
    assert whole.context is not None
    for name, span in spans.items():
        assert span.context is not None
        assert span.context.trace_id == whole.context.trace_id
        assert span.attributes is not None
        assert (span.attributes["headrace.run_id"], span.attributes["headrace.group_id"]) == ("run-a", "00000007")
        assert (span.parent is None) == (name == "prompt group")
        assert span.parent is None or span.parent.span_id == whole.context.span_id
    assert dict(whole.attributes or {}) == {
        "headrace.run_id": "run-a",
        "headrace.group_id": "00000007",
        "headrace.outcome": "trained",
        "headrace.step": 4,
        "headrace.num_completions": 2,
        "headrace.num_tokens": 4,
        "headrace.oldest_policy_version": 3,
    }


def test_a_span_names_the_service_and_the_replica_whose_work_it_was() -> None:
    told = Told()
    told.traces.trained([waiting(7, *LIFE)], step=4)
    told.traces.settled(["00000007"])
    did = {
        name: (span.resource.attributes["service.name"], (span.attributes or {}).get("headrace.replica"))
        for name, span in told.spans().items()
    }
    assert did == {
        "prompt group": ("headrace-trainer", None),
        "queue": ("headrace-generator", "generator-0"),
        "generate": ("headrace-generator", "generator-0"),
        "score": ("headrace-rewarder", "rewarder-1"),
        "train": ("headrace-trainer", "trainer-0"),
        "checkpoint": ("headrace-trainer", "trainer-0"),
    }


def test_a_dropped_group_has_a_trace_with_the_reason() -> None:
    told = Told()
    told.traces.dropped(waiting(7, *LIFE), "stale")
    told.traces.settled(["00000007", "00000008"])
    spans = told.spans()
    assert spans.keys() == {"prompt group", "queue", "generate", "score", "drop", "checkpoint"}
    assert (spans["drop"].attributes or {})["headrace.outcome"] == "dropped_stale"


def test_clocks_that_disagree_make_no_span_that_ends_before_it_begins() -> None:
    told = Told()
    told.traces.trained([waiting(7, Stamp("claimed", 0.5, "generator-0"), *LIFE[1:])], step=4)
    told.traces.settled(["00000007"])
    assert all((span.end_time or 0) >= (span.start_time or 0) > 0 for span in told.spans().values())


def test_without_a_collector_nothing_is_sent_and_no_library_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    traces = GroupTraces.from_environment({}, run_id="run-a", replica_id="trainer-0")
    traces.trained([waiting(7, *LIFE)], step=4)
    traces.settled(["00000007"])
    traces.close(timeout_s=20)


def test_a_missing_library_is_a_sentence_and_no_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with caplog.at_level(logging.WARNING):
        traces = GroupTraces.from_environment(environment, run_id="run-a", replica_id="trainer-0")
    assert f"Install with {install_extras('tracing')} where the trainer runs" in caplog.text
    traces.trained([waiting(7, *LIFE)], step=4)
    traces.settled(["00000007"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "256"),  # below the SDK's own batch size of 512
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
    ],
)
def test_a_setting_that_the_library_refuses_is_a_sentence_and_no_end_of_the_run(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", name: value}
    for variable in environment:
        monkeypatch.setenv(variable, environment[variable])
    with caplog.at_level(logging.WARNING):
        traces = GroupTraces.from_environment(environment, run_id="run-a", replica_id="trainer-0")
    assert "no traces are sent: OpenTelemetry refuses its settings; check the OTEL_* variables" in caplog.text
    traces.trained([waiting(7, *LIFE)], step=4)
    traces.settled(["00000007"])
    traces.close(timeout_s=20)


def test_a_trace_that_the_library_refuses_is_the_last_and_no_end_of_a_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(SpanProcessor):
        num_spans = 0

        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            self.num_spans += 1
            raise RuntimeError("can't start new thread")

    processor = Refusing()
    traces = GroupTraces.through(processor, run_id="run-a", replica_id="trainer-0")
    traces.trained([waiting(7, *LIFE), waiting(8, *LIFE)], step=4)
    traces.settled(["00000007", "00000008"])
    assert "no more traces are sent" in caplog.text
    traces.dropped(waiting(9, *LIFE), "stale")
    traces.settled(["00000009"])
    assert processor.num_spans == 1


class Collector(ThreadingHTTPServer):
    """Receives the requests of an OTLP exporter."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        cast("Collector", self.server).requests.append(request)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the library named it
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


def test_a_collector_that_takes_nothing_does_not_hold_up_the_end_of_a_run() -> None:
    answered = threading.Event()

    def send() -> None:
        answered.wait(timeout=600)

    traces = GroupTraces("run-a", end=send)
    began_at = time.monotonic()
    traces.close(timeout_s=0.1)
    assert time.monotonic() - began_at < 120
    answered.set()


async def test_every_group_of_a_run_arrives_at_the_collector(
    redis: Redis, tmp_path: Path, tiny_model: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    await create(redis, small_config(tmp_path, tiny_model), tmp_path)
    all_traces: list[GroupTraces] = []
    await train(
        redis,
        played=PlayedServices(redis),
        sender=FakeSender(redis),
        meddle=lambda loop: all_traces.append(loop.reporting.traces),
    )
    all_traces[0].close(timeout_s=20)
    attributes = [
        {item.key: item.value.string_value or item.value.int_value for item in span.attributes}
        for span in collector.spans()
        if span.name == "prompt group"
    ]
    assert sorted(found["headrace.group_id"] for found in attributes) == [f"{number:08d}" for number in range(12)]
    assert {(found["headrace.run_id"], found["headrace.outcome"]) for found in attributes} == {(RUN_ID, "trained")}
    assert {found["headrace.step"] for found in attributes} == {1, 2, 3, 4, 5, 6}
