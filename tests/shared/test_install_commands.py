"""A message about a missing package names a command that works in the environment that lacks it."""

import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shared import install_commands
from shared.install_commands import install_extras, install_packages

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ["headrace", "services", "shared"]
METADATA = """Metadata-Version: 2.4
Name: headrace
Version: 0.1.0
Requires-Dist: numpy>=2.0
Provides-Extra: report
Requires-Dist: tensorboard>=2.21; extra == 'report'
Requires-Dist: wandb>=0.31; extra == 'report'
Provides-Extra: demo
Requires-Dist: matplotlib>=3.10; extra == 'demo'
Requires-Dist: tensorboard>=2.21; extra == 'demo'
"""


def installed(directory: Path, monkeypatch: pytest.MonkeyPatch, *, direct_url: dict[str, Any] | None = None) -> None:
    """Make importlib find an installation of headrace with this metadata, and no other."""
    about = directory / "headrace-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(METADATA)
    if direct_url is not None:
        (about / "direct_url.json").write_text(json.dumps(direct_url))

    def distribution(name: str) -> importlib.metadata.Distribution:
        assert name == "headrace"
        return importlib.metadata.PathDistribution(about)

    def requires(name: str) -> list[str] | None:
        return distribution(name).requires

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(importlib.metadata, "requires", requires)


def in_pip(command: str) -> list[str]:
    """Return what a command gives to pip, which runs in this environment."""
    words = shlex.split(command.strip("`"))
    begin = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None:
        begin = ["uv", "pip", "install", "--python", sys.executable]
    assert words[: len(begin)] == begin
    return words[len(begin) :]


def test_a_checkout_installs_its_own_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "my headrace"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    installed(tmp_path, monkeypatch, direct_url={"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert in_pip(install_extras("report", "demo")) == ["-e", f"{checkout}[report,demo]"]


@pytest.mark.parametrize("direct_url", [None, {"url": "file:///wheels/headrace-0.1.0.whl", "archive_info": {}}])
def test_a_wheel_installs_the_packages_of_the_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: dict[str, Any] | None
) -> None:
    installed(tmp_path, monkeypatch, direct_url=direct_url)
    assert in_pip(install_extras("report")) == ["tensorboard>=2.21", "wandb>=0.31"]
    assert in_pip(install_extras("report", "demo")) == ["tensorboard>=2.21", "wandb>=0.31", "matplotlib>=3.10"]
    assert in_pip(install_packages("mlflow")) == ["mlflow"]


def test_a_checkout_that_was_removed_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"url": (tmp_path / "gone").as_uri(), "dir_info": {"editable": True}}
    installed(tmp_path, monkeypatch, direct_url=gone)
    assert in_pip(install_extras("demo")) == ["matplotlib>=3.10", "tensorboard>=2.21"]


def test_an_image_is_extended_by_a_line_of_its_dockerfile(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    line, _, where = install_extras("report").partition("` ")
    assert line.startswith("`RUN ")
    assert where == "in the Dockerfile of an image built from this one"
    assert in_pip(line.removeprefix("`RUN ")) == PROJECT["optional-dependencies"]["report"]
    assert install_commands.packages_of(["trainer-8bit"]) == PROJECT["optional-dependencies"]["trainer-8bit"]


def test_no_message_asks_an_index_for_headrace() -> None:
    asking = ("headrace[", "install headrace")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if any(phrase in line for phrase in asking) and path.name != "install_commands.py"
    ]
    assert found == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_no_page_asks_an_index_for_headrace(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    asking = [line for line in text.splitlines() if re.search(r"""pip install ["']?headrace\[""", line)]
    assert [line for line in asking if " @ file://" not in line] == []


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="pip install hatchling, as `make test` does")
def test_a_wheel_of_this_tree_has_the_extras_of_the_project_and_its_own_advice(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("headrace-*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    (about,) = unpacked.glob("headrace-*.dist-info")
    found = importlib.metadata.PathDistribution(about)
    assert found.version == PROJECT["version"]
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    assert set(found.metadata.get_all("Provides-Extra") or ()) == extras.keys()
    assert {entry.name: entry.value for entry in found.entry_points} == {"headrace": "headrace.__main__:main"}
    assert sorted(path.name for path in unpacked.iterdir() if path != about) == PACKAGES
    tree = {
        path.relative_to(ROOT) for name in ("headrace", "services", "shared") for path in (ROOT / name).rglob("*.py")
    }
    assert {path.relative_to(unpacked) for path in unpacked.rglob("*.py")} == tree
    told = "import sys; sys.path.insert(0, sys.argv[1]); from shared import install_commands as c; "
    told += "print(c.__file__, *c.packages_of(sys.argv[2:]), sep='\\n')"
    for extra, packages in extras.items():
        said = subprocess.run(
            [sys.executable, "-I", "-c", told, str(unpacked), extra],
            capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
        ).stdout.splitlines()  # fmt: skip
        assert said[0] == str(unpacked / "shared" / "install_commands.py")
        assert [text.replace(" ", "") for text in sorted(said[1:])] == sorted(map(normal, packages)), extra


def normal(requirement: str) -> str:
    """Return a requirement as the metadata of a wheel writes it: the specifiers in another order, without spaces."""
    from packaging.requirements import Requirement

    return str(Requirement(requirement)).replace(" ", "")
