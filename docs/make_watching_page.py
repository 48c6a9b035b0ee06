"""Writes the tables in watching.md: ``python docs/make_watching_page.py``. A test compares them.

Metrics come out of the services' own registries, alerts out of the rules. Only the units are written here: a metric
without one, or a unit without its metric, is an error.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from services.generator.metrics import GeneratorMetrics
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.sessions.session_metrics import SessionMetrics
from services.trainer.run_api.run_metrics import RunMetrics

PAGE = Path(__file__).with_name("watching.md")
RULES = Path(__file__).parent.parent / "deploy" / "observability" / "alerts" / "headrace.yml"

UNITS = {
    "headrace_keys_file_broken": "0 or 1",
    "headrace_runs": "runs",
    "headrace_rank_up": "0 or 1",
    "headrace_rank_restarts_total": "restarts",
    "headrace_run_step": "steps",
    "headrace_run_max_steps": "steps",
    "headrace_run_policy_version": "steps",
    "headrace_run_groups": "groups",
    "headrace_run_pushes": "pushes",
    "headrace_run_probes_failed": "generators",
    "headrace_run_rank_starts": "starts",
    "headrace_run_stream_depth": "groups",
    "headrace_run_max_staleness_steps": "steps",
    "headrace_run_generators_alive": "replicas",
    "headrace_run_generators_serving": "replicas",
    "headrace_run_generators_left_out": "replicas",
    "headrace_run_rewarders_alive": "replicas",
    "headrace_run_sessions_alive": "replicas",
    "headrace_run_paused": "0 or 1",
    "headrace_run_paused_seconds": "seconds",
    "headrace_run_evaluating": "0 or 1",
    "headrace_run_ending": "0 or 1",
    "headrace_run_disk_free_bytes": "bytes",
    "headrace_run_disk_size_bytes": "bytes",
    "headrace_redis_up": "0 or 1",
    "headrace_redis_memory_used_bytes": "bytes",
    "headrace_redis_memory_max_bytes": "bytes",
    "headrace_redis_aof_writing": "0 or 1",
    "headrace_replica_info": "1",
    "headrace_generated_tokens_total": "tokens",
    "headrace_groups_generated_total": "groups",
    "headrace_groups_generated_twice_total": "groups",
    "headrace_groups_in_flight": "groups",
    "headrace_inflight_window": "groups",
    "headrace_kv_cache_usage": "share",
    "headrace_requests_running": "completions",
    "headrace_requests_waiting": "completions",
    "headrace_requests_preempted_total": "completions",
    "headrace_requests_recomputed_total": "completions",
    "headrace_generator_policy_version": "steps",
    "headrace_generator_held": "0 or 1",
    "headrace_reward_seconds": "seconds",
    "headrace_reward_outcomes_total": "completions",
    "headrace_reward_groups_total": "groups",
    "headrace_reward_groups_in_flight": "groups",
    "headrace_reward_calls_in_flight": "calls",
    "headrace_reward_queue_depth": "calls or requests",
    "headrace_reward_value_mean": "",
    "headrace_reward_value_std": "",
    "headrace_reward_worker_kills_total": "workers",
    "headrace_reward_endpoint_requests_in_flight": "requests",
    "headrace_reward_endpoint_requests_queued": "requests",
    "headrace_reward_endpoint_breaker_state": "0, 1 or 2",
    "headrace_reward_endpoint_retries_total": "requests",
    "headrace_reward_model_forward_seconds": "seconds",
    "headrace_reward_model_batch_texts": "texts",
    "headrace_reward_model_tokens_total": "tokens",
    "headrace_reward_model_loads_total": "loads",
    "headrace_reward_model_kills_total": "processes",
    "headrace_reward_models_loaded": "processes",
    "headrace_session_groups_total": "groups",
    "headrace_session_environments": "rollouts",
    "headrace_session_groups_in_flight": "groups",
    "headrace_session_rollouts_total": "rollouts",
    "headrace_session_turns_total": "turns",
    "headrace_session_tool_calls_total": "calls",
    "headrace_session_worker_kills_total": "workers",
    "headrace_session_calls_waiting": "calls",
    "headrace_session_forks_total": "rows",
    "headrace_session_drifted_tokens_total": "tokens",
}


@dataclass(frozen=True)
class Served:
    """One metric as a service serves it; a histogram's series have more names than its own."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def registries() -> dict[str, CollectorRegistry]:
    """Return the registry of each service, as the service makes it."""
    rewarder = RewarderMetrics()
    RewardModelMetrics(rewarder.registry)
    nothing = cast("Any", None)  # it is asked for nothing: only the names are looked at
    trainer = RunMetrics(nothing, store=nothing, supervisor=nothing)
    return {
        "trainer": trainer.registry,
        "generator": GeneratorMetrics().registry,
        "rewarder": rewarder.registry,
        "sessions": SessionMetrics().registry,
    }


def served(registry: CollectorRegistry) -> Iterator[Served]:
    """Yield the metrics of a registry in the order in which they were made, training_gauges.py's left out."""
    collectors = cast("dict[object, object]", registry._collector_to_names)  # noqa: SLF001  labels are told nowhere else
    for collector in collectors:
        if isinstance(collector, MetricWrapperBase):
            (family,) = collector.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = tuple(cast("Any", collector)._labelnames)  # noqa: SLF001
            yield Served(name, family.type, labels, family.documentation)


def page() -> str:
    """Return the page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    known: set[str] = set()
    for service, registry in registries().items():
        metrics = list(served(registry))
        known |= {metric.name for metric in metrics}
        rows = "".join(_row(metric) for metric in metrics)
        text = _filled(text, service, "| metric | kind | labels | unit | meaning |\n|---|---|---|---|---|\n" + rows)
    if superfluous := UNITS.keys() - known:
        raise SystemExit(f"no service has {sorted(superfluous)}")
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    head = "| alert | severity | fires after | says |\n|---|---|---|---|\n"
    return _filled(text, "alerts", head + "".join(_alert(alert) for alert in alerts))


def _filled(text: str, name: str, table: str) -> str:
    pattern = rf"(<!-- table of {name}:.*?-->\n).*?(<!-- end of {name})"
    filled, count = re.subn(pattern, lambda m: m[1] + table + m[2], text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for the table of {name}")
    return filled


def _row(metric: Served) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    if metric.name not in UNITS:
        raise SystemExit(f"{metric.name} has no unit in {__file__}")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {UNITS[metric.name]} | {_cell(metric.meaning)} |\n"


def _alert(alert: dict[str, Any]) -> str:
    summary = re.sub(
        r"\{\{ *\$(labels\.(\w+)|value)[^}]*\}\}", lambda m: f"*{m[2] or 'value'}*", alert["annotations"]["summary"]
    )
    return f"| `{alert['alert']}` | {alert['labels']['severity']} | {alert.get('for', '')} | {_cell(summary)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
