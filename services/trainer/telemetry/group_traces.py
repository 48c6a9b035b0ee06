"""Sends the life of each settled prompt group to an OpenTelemetry collector as a trace. Off by default.

    prompt group   admitted ------------------------------------------------------------------> settled
      queue        admitted --> claimed
      generate                  claimed --> generated
      score                                 generated --> scored
      train                                               scored --> trained (or drop: scored --> dropped)
      checkpoint                                                     trained --> settled

The services pass no trace context. A group carries stamps anyway. When a checkpoint contains the group, its spans are
made here from the stamps' times, by the clocks of the replicas that made them. ``settled`` is when the group was acked.
Groups that were dropped before scoring have no trace, and neither do groups whose trainer died before its checkpoint.
Tracing can neither stop nor slow down the run: spans that the collector does not accept are dropped, and an error of
the SDK turns tracing off.

OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT turns tracing on. The SDK reads its OTEL_* variables.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.trainer.groups.group_ids import group_id
from services.trainer.groups.waiting_group import WaitingGroup
from shared.install_commands import install_extras
from shared.messages import Stamp

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

TRAINED = "trained"
_STAGES = {
    "claimed": ("queue", "generator"),
    "generated": ("generate", "generator"),
    "scored": ("score", "rewarder"),
    TRAINED: ("train", "trainer"),
    "dropped": ("drop", "trainer"),
    "settled": ("checkpoint", "trainer"),
}
"""For each stamp, the span that ends with it and the service of that span."""
_SERVICES = ("trainer", "generator", "rewarder")
_NOT_OURS = (ValueError, TypeError, RuntimeError, OSError)
"""Errors that the SDK raises for invalid variables or spans."""
_MAX_QUEUED_SPANS = 65_536
"""Queue size. A checkpoint settles all its groups at once; the SDK's default of 2,048 would drop most spans."""


@dataclass(frozen=True)
class _Life:
    stamps: tuple[Stamp, ...]
    attributes: Mapping[str, str | int]


class GroupTraces:
    """Records what happens to one run's prompt groups, and sends a trace of each group once a checkpoint contains it.

    Args:
        run_id: The run's id.
        replica_id: This trainer's replica id.
        tracers: OpenTelemetry tracers by service, so that viewers tell services apart. Without any, tracing is off.
        end: Sends the remaining spans, and returns when they are sent.
    """

    def __init__(
        self,
        run_id: str = "",
        *,
        replica_id: str = "",
        tracers: "Mapping[str, Tracer] | None" = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_id = run_id
        self._replica_id = replica_id
        self._tracers = tracers or {}
        self._end = end
        self._ended: dict[str, _Life] = {}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, run_id: str, replica_id: str) -> "GroupTraces":
        """Return a GroupTraces for the collector in the OTEL_* variables; disabled without one, or if the SDK fails."""
        if not any(environment.get(f"OTEL_EXPORTER_OTLP_{which}ENDPOINT") for which in ("", "TRACES_")):
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            processor = BatchSpanProcessor(
                OTLPSpanExporter(),
                max_queue_size=None if "OTEL_BSP_MAX_QUEUE_SIZE" in environment else _MAX_QUEUED_SPANS,
            )
            return cls.through(processor, run_id=run_id, replica_id=replica_id)
        except ImportError as error:
            log.warning(
                "no traces are sent: %s. Install with %s where the trainer runs", error, install_extras("tracing")
            )
        except _NOT_OURS as error:
            log.warning("no traces are sent: OpenTelemetry refuses its settings; check the OTEL_* variables: %s", error)
        return cls()

    @classmethod
    def through(cls, processor: "SpanProcessor", *, run_id: str, replica_id: str) -> "GroupTraces":
        """Return a GroupTraces that sends through this span processor of the SDK."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        tracers: dict[str, Tracer] = {}
        for service in _SERVICES:
            provider = TracerProvider(
                resource=Resource.create({"service.name": f"headrace-{service}"}), shutdown_on_exit=False
            )
            provider.add_span_processor(processor)
            tracers[service] = provider.get_tracer("headrace")
        return cls(run_id, replica_id=replica_id, tracers=tracers, end=processor.shutdown)

    def trained(self, groups: Iterable[WaitingGroup], *, step: int) -> None:
        """Record that optimizer step ``step`` trained these groups."""
        for waiting in groups:
            self._note(waiting, TRAINED, {"headrace.outcome": TRAINED, "headrace.step": step})

    def dropped(self, waiting: WaitingGroup, reason: str) -> None:
        """Record that a scored group will not be trained, and why."""
        self._note(waiting, "dropped", {"headrace.outcome": f"dropped_{reason}"})

    def settled(self, group_ids: Sequence[str]) -> None:
        """Send the traces of groups that a checkpoint now contains. Call it in a thread: there may be thousands."""
        at_s = time.time()
        for name in group_ids:
            life = self._ended.pop(name, None)
            if life is None:
                continue
            try:
                self._tell(life, Stamp("settled", at_s, self._replica_id))
            except _NOT_OURS as error:
                log.warning("no more traces are sent: OpenTelemetry refuses the trace of group %s: %s", name, error)
                self._tracers = {}
                self._ended.clear()

    def close(self, *, timeout_s: float) -> None:
        """Send the remaining spans. Takes at most ``timeout_s`` seconds."""
        thread = threading.Thread(target=self._end, name="last traces", daemon=True)
        thread.start()
        thread.join(timeout_s)

    def _note(self, waiting: WaitingGroup, event: str, attributes: Mapping[str, str | int]) -> None:
        if not self._tracers:
            return
        group, name = waiting.group, group_id(waiting.number)
        ended = Stamp(event, time.time(), self._replica_id)
        self._ended[name] = _Life(
            stamps=(*group.prompt.stamps, *group.stamps, ended),
            attributes={
                "headrace.run_id": self._run_id,
                "headrace.group_id": name,
                "headrace.num_completions": len(group.rollouts),
                "headrace.num_tokens": sum(rollout.num_sampled for rollout in group.rollouts),
                "headrace.oldest_policy_version": waiting.oldest_policy_version,
                **attributes,
            },
        )

    def _tell(self, life: _Life, settled: Stamp) -> None:
        from opentelemetry.trace import set_span_in_context

        first, *others = life.stamps
        whole = self._tracers["trainer"].start_span(
            "prompt group", start_time=_nanoseconds(first), attributes=life.attributes
        )
        inside = set_span_in_context(whole)
        before = first
        for stamp in (*others, settled):
            if stamp.event in _STAGES:
                name, service = _STAGES[stamp.event]
                part = self._tracers[service].start_span(
                    name,
                    context=inside,
                    start_time=_nanoseconds(before),
                    attributes={**life.attributes, "headrace.replica": stamp.by},
                )
                # Clocks of two machines may disagree, but no span may end before it begins.
                part.end(max(_nanoseconds(before), _nanoseconds(stamp)))
            before = stamp
        whole.end(max(_nanoseconds(first), _nanoseconds(settled)))


def _nanoseconds(stamp: Stamp) -> int:
    return int(stamp.at_s * 1e9)
