"""Traces of prompt groups work from a container: the exporter is installed and gets the collector's address."""

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.compose.compose_file import HARDWARE, ROOT, services


def test_the_image_of_the_trainer_holds_what_sends_traces() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements" / "image-trainer.txt").read_text(encoding="utf-8").splitlines()
    held = {line.partition("==")[0] for line in lines}
    wanted = {Requirement(line).name for line in project["optional-dependencies"]["tracing"]}
    assert wanted == {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
    assert wanted <= held


@pytest.mark.parametrize("profile", HARDWARE)
def test_compose_gives_only_the_trainer_the_address_for_traces(profile: str) -> None:
    where = "http://collector:4318"
    told = {
        name: service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        for name, service in services(profile, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": where}).items()
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in service.get("environment", {})
    }
    (name,) = told
    assert name.partition("-")[0] == "trainer"
    assert told[name] == where
    assert services(profile)[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "", "none by default"
