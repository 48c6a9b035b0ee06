"""Writes the table in metrics.md from the catalogue: ``python docs/make_metrics_page.py``. A test compares the two."""

import re
import sys
from pathlib import Path

from services.trainer.telemetry.metric_catalogue import METRICS, Metric

PAGE = Path(__file__).with_name("metrics.md")
HEAD = """| metric | unit | meaning | TRL | Prometheus | only with |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page as it should be."""
    table = HEAD + "".join(_row(metric) for metric in METRICS)
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(r"(<!-- table.*?-->\n).*?(<!-- end of table)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)


def _row(metric: Metric) -> str:
    meaning = metric.meaning.replace("|", "\\|")
    name, in_trl = f"`{metric.name}`", "yes" if metric.in_trl else ""
    return f"| {name} | {metric.unit} | {meaning} | {in_trl} | `{metric.prometheus_name}` | {metric.when} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
