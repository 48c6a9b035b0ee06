"""The newest training metrics as Prometheus gauges: headrace_training_NAME_UNIT{run_id}.

``rewards/length/mean`` is ``headrace_training_rewards_mean{run_id,reward="length"}``; metric_catalogue.py has names,
units and help texts. All of them are gauges, also running totals, because a run that resumes from its checkpoint goes
back. A metric that is not in the catalogue has no series, so that their number is bounded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.trainer.telemetry.metric_catalogue import EVALUATION, Metric, find_metric


class TrainingGauges(Collector):
    """A Prometheus collector of one run's newest training metrics. `show` replaces all of them at once."""

    def __init__(self) -> None:
        self._shown: tuple[str, dict[str, float]] = ("", {})

    def show(self, run_id: str, metrics: Mapping[str, Any]) -> None:
        """Show one run's newest metrics instead of the previous ones. Values that are not numbers are left out."""
        self._shown = run_id, {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}

    def clear(self) -> None:
        """Show no metrics until the next call of `show`."""
        self._shown = "", {}

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield one family of gauges for each metric in the catalogue that the run has reported."""
        families: dict[str, GaugeMetricFamily] = {}
        run_id, metrics = self._shown
        for name, value in metrics.items():
            found = find_metric(name)
            if found is None:
                continue
            metric, labels = found
            prefix = EVALUATION if name.startswith(EVALUATION) and not metric.name.startswith(EVALUATION) else ""
            family = families.setdefault(prefix + metric.name, _family(metric, prefix))
            family.add_metric([run_id, *(labels[label] for label in metric.label_names)], value)
        yield from families.values()


def _family(metric: Metric, prefix: str) -> GaugeMetricFamily:
    name = metric.prometheus_name.replace("headrace_training_", f"headrace_training_{prefix}")
    return GaugeMetricFamily(name, metric.meaning, labels=["run_id", *metric.label_names])
