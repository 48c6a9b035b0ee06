"""deploy/release.py builds images, pushes them in order, and writes values that name them by digest."""

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compose.compose_file import DEPLOY, ROOT
from tests.helm.chart import container, render, workloads

FAKE_DOCKER = """#!{python}
import hashlib, json, os, sys
words = sys.argv[1:]
with open(os.environ["SAID_TO_DOCKER"], "a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == os.environ.get("FAILS_AT"):
    sys.exit(3)
if words[:2] == ["image", "inspect"]:
    name = words[-1]
    digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    repository = name.rpartition(":")[0].removeprefix("index.").removeprefix("docker.io/")
    print(json.dumps(["elsewhere/other@sha256:" + "0" * 64, repository + "@" + digest]))
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake docker into PATH that records its arguments; return the path of the record."""
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(FAKE_DOCKER.format(python=sys.executable))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID_TO_DOCKER", str(tmp_path / "said"))
    return tmp_path / "said"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return deploy/release.py with a registry for charts that accepts everything."""
    spec = importlib.util.spec_from_file_location("release", DEPLOY / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "push_chart", _taken)
    return module


def _taken(_archive: Path, _registry: str, *, plain_http: bool) -> str:
    return f"sha256:chart-{plain_http}"


def digest_of(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def test_all_images_are_built_before_one_is_pushed_and_the_chart_names_them_by_digest(
    said: Path, release: Any, tmp_path: Path
) -> None:
    assert release.main(["registry.example.com/team/", "--out", str(tmp_path / "dist")]) == 0
    words = [json.loads(line) for line in said.read_text().splitlines()]
    assert [one[0] for one in words] == ["build"] * 7 + ["push", "image"] * 7
    built = {one[one.index("--tag") + 1] for one in words if one[0] == "build"}
    services = ("generator", "rewarder", "trainer")
    assert built == {
        *(f"registry.example.com/team/headrace-{it}:0.1.0{cpu}" for it in services for cpu in ("", "-cpu")),
        "registry.example.com/team/headrace-sessions:0.1.0-cpu",
    }
    assert {one[1] for one in words if one[0] == "push"} == built
    for flavour, suffix in (("gpu", ""), ("cpu", "-cpu")):
        values = yaml.safe_load((tmp_path / "dist" / f"values-images-{flavour}.yaml").read_text())
        if flavour == "cpu":
            values |= {name: {"gpus": 0} for name in ("trainer", "generator")}
        found = workloads(render(values))
        for name in (*services, "sessions"):
            repository = f"registry.example.com/team/headrace-{name}"
            tag = "-cpu" if name in ("rewarder", "sessions") else suffix
            assert container(found[name])["image"] == f"{repository}@{digest_of(f'{repository}:0.1.0{tag}')}"
    assert (tmp_path / "dist" / "headrace-0.1.0.tgz").stat().st_size > 10_000


@pytest.mark.parametrize("host", ["docker.io", "index.docker.io"])
@pytest.mark.usefixtures("said")
def test_digests_of_docker_hub_are_found_although_docker_reports_them_without_its_host(
    release: Any, tmp_path: Path, host: str
) -> None:
    assert release.main([f"{host}/me", "--flavour", "cpu", "--out", str(tmp_path)]) == 0
    values = yaml.safe_load((tmp_path / "values-images-cpu.yaml").read_text())
    assert values["images"]["trainer"]["digest"] == digest_of(f"{host}/me/headrace-trainer:0.1.0-cpu")


@pytest.mark.parametrize(
    ("flavours", "named"),
    [([], "gpu"), (["--flavour", "cpu", "--flavour", "gpu"], "gpu"), (["--flavour", "cpu"], "cpu")],
)
@pytest.mark.usefixtures("said")
def test_the_last_line_is_a_command_whose_values_the_chart_takes(
    release: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flavours: list[str], named: str
) -> None:
    assert release.main(["registry.example.com", "--out", str(tmp_path), *flavours]) == 0
    *_, install = capsys.readouterr().out.splitlines()
    words = install.partition("#")[0].split()
    path = Path(words[words.index("-f") + 1])
    assert path.name == f"values-images-{named}.yaml"
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    for word, following in itertools.pairwise(words):
        if word == "--set":
            service, number = following.split(".gpus=")
            values[service] = {"gpus": int(number)}
    assert render(values)


@pytest.mark.parametrize(("step", "is_pushed"), [("build", False), ("push", True)])
def test_a_step_that_fails_ends_it_with_a_sentence(
    said: Path,
    release: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: str,
    *,
    is_pushed: bool,
) -> None:
    monkeypatch.setenv("FAILS_AT", step)
    assert release.main(["r.example.com", "--flavour", "cpu", "--out", str(tmp_path / "dist")]) == 1
    assert f"release: `docker {step} " in capsys.readouterr().err
    assert ('["push"' in said.read_text()) is is_pushed
    assert not (tmp_path / "dist" / "values-images-cpu.yaml").exists()


def test_without_docker_it_fails_with_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEPLOY / "release.py", "r.example.com", "--out", tmp_path],
        env={"PATH": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "release: there is no docker in PATH\n")
