"""requirements/get_promtool.sh with a fake package manager: it gives a promtool that runs, or none."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "requirements" / "get_promtool.sh"
TOOLS = ("bash", "sh", "find", "id", "mkdir", "mktemp", "mv", "rm", "tar", "touch")
WORKS, FAILS = "#!/bin/sh\nexit 0\n", "#!/bin/sh\nexit 1\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a PATH with the commands that the script calls, but without a promtool of its own."""
    directory = tmp_path / "tools"
    directory.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (directory / name).symlink_to(found)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    return directory


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def package(tools: Path, *, promtool: str, downloads: bool = True) -> None:
    """Make apt-get record its arguments, and put this promtool into the package."""
    there = tools.parent / "package"
    executable(there / "usr" / "bin" / "promtool", promtool)
    download = ": >prometheus_2.deb" if downloads else "exit 100"
    log = tools.parent / "asked"
    executable(tools / "apt-get", f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in *download*) {download};; esac\n')
    executable(tools / "dpkg-deb", f"#!/bin/sh\nexec tar -C {there} -c ./usr/bin/promtool\n")


def get(tools: Path) -> tuple[str, int]:
    """Run the script; return its output, and the number of apt-get calls so far."""
    venv, log = tools.parent / "venv", tools.parent / "asked"
    done = subprocess.run(
        [str(SCRIPT), str(venv)], env={"PATH": str(tools)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, len(log.read_text().splitlines())


def test_a_promtool_that_runs_is_put_into_the_environment_and_fetched_once(tools: Path) -> None:
    package(tools, promtool=WORKS)
    said, num_asked = get(tools)
    assert "promtool of Debian's package prometheus is in" in said
    assert (tools.parent / "venv" / "bin" / "promtool").read_text() == WORKS
    assert get(tools) == ("", num_asked)


@pytest.mark.parametrize(("promtool", "downloads"), [(FAILS, True), (WORKS, False)])
def test_a_download_that_does_not_run_is_not_kept_and_not_repeated_at_once(
    tools: Path, promtool: str, *, downloads: bool
) -> None:
    package(tools, promtool=promtool, downloads=downloads)
    said, num_asked = get(tools)
    assert "install.log says why" in said
    assert not (tools.parent / "venv" / "bin" / "promtool").exists()
    said, again = get(tools)
    assert "within the last day" in said
    assert again == num_asked
    package(tools, promtool=WORKS)
    (tools.parent / "venv" / "no-promtool").unlink()
    get(tools)
    assert (tools.parent / "venv" / "bin" / "promtool").exists()
