"""Writes the dashboards as Grafana's JSON: ``python deploy/observability/make_dashboards.py``. A test compares both.

    dashboards/NAME.yaml  for people to edit: rows, panels, PromQL --> grafana/dashboards/NAME.json

A row has either ``stats``, which are panels with a number, or ``graphs``. Keys of a panel; the second line is optional:

    title, about, queries {legend: PromQL}, unit (Grafana's id, or any word), or names {value: [text, color]} for states
    decimals, colors {color: from}, stacked, log, from, to, dashed (a legend), right {legend, unit} for a second axis
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

HERE = Path(__file__).parent
SOURCES, FOLDER = HERE / "dashboards", HERE / "grafana" / "dashboards"
NAMES = ("pipeline", "rewarder")

Json: TypeAlias = dict[str, Any]

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SHORTHANDS = {
    "RUN": 'namespace=~"$namespace", run_id=~"$run_id"',
    "FLEET": 'namespace=~"$namespace"',
    "FUNCTION": 'namespace=~"$namespace", function=~"$function"',
}
_NAMED = r"\1{FLEET} * on (namespace, job, instance) group_left (replica_id) headrace_replica_info{FLEET}"
"""The expansion of NAMED(metric): its series with the replicas' names, which people know better than addresses."""
_UNITS_OF_GRAFANA = {"none", "s", "bytes", "mbytes", "percent", "percentunit", "sci", "watt"}
_STAT, _GRAPH, _STATES = "stat", "timeseries", "state-timeline"
_WIDTH, _HEIGHTS = 24, {_STAT: 4, _GRAPH: 8, _STATES: 8}
_OPTIONAL = {"decimals", "colors", "stacked", "log", "from", "to", "dashed", "right"}


def dashboard(source: Mapping[str, Any]) -> Json:
    """Return the dashboard in Grafana's format."""
    panels: list[Json] = []
    top = 0
    for row in source["rows"]:
        panels.append(
            {"type": "row", "title": row["row"], "collapsed": False, "panels": [], "gridPos": _place(0, top, _WIDTH, 1)}
        )
        top += 1
        members = [_stat(it) for it in row.get("stats", [])] or [_graph(it) for it in row["graphs"]]
        in_a_line = len(members) if members[0]["type"] == _STAT else 2 if len(members) == 4 else 3
        for first in range(0, len(members), in_a_line):
            line = members[first : first + in_a_line]
            height = max(_HEIGHTS[panel["type"]] for panel in line)
            for number, panel in enumerate(line):
                left, right = _WIDTH * number // len(line), _WIDTH * (number + 1) // len(line)
                panels.append(panel | {"gridPos": _place(left, top, right - left, height)})
            top += height
    return {
        "uid": source["uid"],
        "title": source["title"],
        "description": source["about"],
        "tags": ["headrace"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "title": "headrace", "tags": ["headrace"], "keepTime": True}],
        "templating": {"list": [_VARIABLES[name] for name in ("datasource", *source["variables"])]},
        "annotations": {"list": [_FIRING]},
        "panels": [{"id": number} | panel for number, panel in enumerate(panels, start=1)],
    }


def _stat(source: Mapping[str, Any]) -> Json:
    panel = _panel(_STAT, source)
    is_colored = "colors" in source or "names" in source
    colors = source.get("colors", {"text": None})
    panel["fieldConfig"]["defaults"] |= {
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": [{"color": color, "value": at} for color, at in colors.items()]},
    }
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background" if is_colored else "value",
        "graphMode": "none",
        "justifyMode": "center",
        "textMode": "value_and_name" if len(source["queries"]) > 1 else "value",
    }
    return panel


def _graph(source: Mapping[str, Any]) -> Json:
    if "names" in source:
        panel = _panel(_STATES, source)
        panel["fieldConfig"]["defaults"]["custom"] = {"fillOpacity": 70, "lineWidth": 0}
        panel["options"] = {"showValue": "auto", "mergeValues": True, "legend": {"showLegend": False}}
        return panel
    panel = _panel(_GRAPH, source)
    is_stacked = source.get("stacked", False)
    defaults = panel["fieldConfig"]["defaults"]
    defaults["custom"] = {
        "lineWidth": 1,
        "fillOpacity": 25 if is_stacked else 8,
        "showPoints": "never",
        "spanNulls": 60_000,  # ms: one or two failed scrapes do not show as a gap
        "stacking": {"mode": "normal" if is_stacked else "none"},
        "scaleDistribution": {"type": "log", "log": 10} if source.get("log") else {"type": "linear"},
    }
    if source.get("from") != "auto" and not source.get("log"):
        defaults["min"] = 0
    if "to" in source:
        defaults["max"] = source["to"]
    panel["fieldConfig"]["overrides"] = list(_overrides(source))
    panel["options"] = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def _overrides(source: Mapping[str, Any]) -> list[Json]:
    found: list[Json] = []
    if "dashed" in source:
        dashes = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}
        bare = {"id": "custom.fillOpacity", "value": 0}
        found.append({"matcher": {"id": "byName", "options": source["dashed"]}, "properties": [dashes, bare]})
    if "right" in source:
        axis = {"id": "custom.axisPlacement", "value": "right"}
        unit = {"id": "unit", "value": _unit(source["right"]["unit"])}
        matcher = {"id": "byRegexp", "options": f"/^({source['right']['legend']})$/"}
        found.append({"matcher": matcher, "properties": [axis, unit]})
    return found


def _panel(kind: str, source: Mapping[str, Any]) -> Json:
    unknown = source.keys() - {"title", "about", "queries", "unit", "names"} - _OPTIONAL
    if unknown:
        raise ValueError(f"panel {source['title']!r} has {sorted(unknown)}, which are not known keys")
    defaults: Json = {"unit": _unit(source["unit"]) if "names" not in source else "none"}
    if "decimals" in source:
        defaults["decimals"] = source["decimals"]
    if "names" in source:
        texts = {str(value): {"text": text, "color": color} for value, (text, color) in source["names"].items()}
        defaults["mappings"] = [{"type": "value", "options": texts}]
    return {
        "type": kind,
        "title": source["title"],
        "description": source["about"],
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": promql(expression),
                "legendFormat": legend,
                "instant": kind == _STAT,
                "range": kind != _STAT,
            }
            for number, (legend, expression) in enumerate(source["queries"].items())
        ],
    }


def promql(expression: str) -> str:
    """Return the PromQL expression with all shorthands expanded."""
    expression = re.sub(r"\bNAMED\((\w+)\)", _NAMED, expression)
    return re.sub(r"\b(RUN|FLEET|FUNCTION)\b", lambda found: _SHORTHANDS[found[1]], expression)


def _unit(name: str) -> str:
    return name if name in _UNITS_OF_GRAFANA else f"suffix:{name}"


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": promql(query), "refId": "variable"},
        "refresh": 2,  # when the time range changes, so that a look back also finds ended runs
        "sort": 0,
        "multi": False,
        "includeAll": True,
        "allValue": ".*",  # also matches series without the label
        "current": {"text": "All", "value": "$__all"},
    }


_VARIABLES: dict[str, Json] = {
    "datasource": {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
    "namespace": _variable("namespace", "namespace", "label_values(headrace_runs, namespace)"),
    "run_id": _variable("run_id", "run", "label_values(headrace_run_step{FLEET}, run_id)"),
    "function": _variable("function", "function", "label_values(headrace_reward_outcomes_total{FLEET}, function)"),
}
_FIRING = {
    "name": "alerts",
    "datasource": _DATASOURCE,
    "enable": True,
    "iconColor": "red",
    "expr": 'ALERTS{alertname=~"Headrace.+", alertstate="firing"}',
    "titleFormat": "{{alertname}}",
    "step": "60s",
}


def written(name: str) -> str:
    """Return the text of a dashboard's JSON file."""
    source = yaml.safe_load((SOURCES / f"{name}.yaml").read_text(encoding="utf-8"))
    return json.dumps(dashboard(source), indent=2) + "\n"


if __name__ == "__main__":
    for each in NAMES:
        (FOLDER / f"{each}.json").write_text(written(each), encoding="utf-8")
