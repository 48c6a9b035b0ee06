"""The dashboards match their sources, and each panel can be read by a person."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.conftest import OBSERVABILITY, loaded

maker: Any = loaded(OBSERVABILITY / "make_dashboards.py")
FILES = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))
PANELS = [
    pytest.param(panel, id=f"{path.stem}: {panel['title']}")
    for path in FILES
    for panel in json.loads(path.read_text())["panels"]
    if panel["type"] != "row"
]


def test_every_source_has_its_dashboard() -> None:
    sources = sorted(path.stem for path in (OBSERVABILITY / "dashboards").glob("*.yaml"))
    assert sources == sorted(maker.NAMES) == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_what_its_source_says(path: Path) -> None:
    assert path.read_text() == maker.written(path.stem), "run: python deploy/observability/make_dashboards.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_have_numbers_and_places_of_their_own(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["type"], panel["title"]) for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, f"{panel['title']} lies on top of another panel"
        taken |= cells


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["title"][0].isupper() or panel["title"].startswith("KV")
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert all(legends)
    assert len(set(legends)) == len(legends)
    drawn = {legend for override in panel["fieldConfig"]["overrides"] for legend in [override["matcher"]["options"]]}
    for wanted in drawn:
        pattern = wanted.strip("/^$()")
        assert any(legend in pattern or pattern.split("|")[0].rstrip(".*") in legend for legend in legends), wanted


def test_a_word_that_nothing_reads_is_refused() -> None:
    source = yaml.safe_load((OBSERVABILITY / "dashboards" / "rewarder.yaml").read_text())
    source["rows"][1]["graphs"][0]["stakced"] = True
    with pytest.raises(ValueError, match="'Outcomes' has \\['stakced'\\], which are not known keys"):
        maker.dashboard(source)


def test_grafana_gets_the_places_of_prometheus_and_the_dashboards() -> None:
    provisioning = OBSERVABILITY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"], source["url"]) == ("prometheus", True, "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "headrace.yml").read_text())["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")
