"""Builds the images and the chart, pushes both to an OCI registry, and writes values that name the images by digest.

    deploy/docker/*.Dockerfile --docker build, push--> REGISTRY/headrace-SERVICE:VERSION[-cpu]
    deploy/helm/headrace       --package, push------> REGISTRY/charts/headrace:VERSION
                                                      OUT/values-images-gpu.yaml, OUT/values-images-cpu.yaml

Log in first with `docker login REGISTRY`, which is also used for the chart. Nothing is pushed until all images are
built. The values name digests because a tag can be moved to other content.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shared.version import VERSION  # noqa: E402

FLAVOURS = ("gpu", "cpu")
SERVICES = {"generator": FLAVOURS, "rewarder": FLAVOURS, "sessions": ("cpu",), "trainer": FLAVOURS}
WITHOUT_GPUS = ("rewarder", "sessions")
"""The services that usually have no GPU, and so need their CPU image beside the GPU images of the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("registry", help="where to push to, without https://, such as registry.example.com/team")
    parser.add_argument("--flavour", choices=FLAVOURS, action="append", help="gpu or cpu; both if not given")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the chart and the values")
    parser.add_argument("--build-arg", action="append", default=[], help="passed on to docker build, such as BASE=...")
    parser.add_argument("--build-network", default="default", help="passed on to docker build as --network")
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    options = parser.parse_args(arguments)
    registry = options.registry.rstrip("/")
    flavours = options.flavour or list(FLAVOURS)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        chart = package(options.out)
        wanted = images_of(flavours)
        for service, flavour in wanted:
            build(registry, service, flavour, build_args=options.build_arg, network=options.build_network)
        digests = {one: push(registry, *one) for one in wanted}
        chart_digest = push_chart(chart, registry, plain_http=options.plain_http)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for flavour in flavours:
        path = options.out / f"values-images-{flavour}.yaml"
        path.write_text(values(registry, flavour, digests), encoding="utf-8")
        print(f"wrote {path}")
    print(f"{install_command(registry, flavours, options.out)}    # {chart_digest}")
    return 0


class ReleaseError(Exception):
    """A step failed; the message says which and why."""


def images_of(flavours: Sequence[str]) -> list[tuple[str, str]]:
    """Return service and flavour of every image, always with the CPU images of WITHOUT_GPUS."""
    wanted = [(service, flavour) for flavour in flavours for service in SERVICES if flavour in SERVICES[service]]
    return wanted if "cpu" in flavours else [*wanted, *((service, "cpu") for service in WITHOUT_GPUS)]


def reference(registry: str, service: str, flavour: str) -> str:
    """Return the name of an image with its tag, composed as in the chart."""
    return f"{registry}/headrace-{service}:{VERSION}{'-cpu' if flavour == 'cpu' else ''}"


def build(registry: str, service: str, flavour: str, *, build_args: Sequence[str], network: str) -> None:
    """Build one image."""
    given = [f"VERSION={VERSION}", f"REVISION={revision()}", *build_args]
    docker(
        "build", "--file", f"deploy/docker/{service}.Dockerfile", "--target", flavour, "--network", network,
        *(word for one in given for word in ("--build-arg", one)),
        "--tag", reference(registry, service, flavour), ".",
    )  # fmt: skip


def push(registry: str, service: str, flavour: str) -> str:
    """Push one image and return its digest in the registry."""
    name = reference(registry, service, flavour)
    docker("push", name)
    said = docker("image", "inspect", "--format", "{{json .RepoDigests}}", name, is_shown=False)
    repository = _without_docker_hub(name.rpartition(":")[0])
    reported = [one.partition("@") for one in json.loads(said)]
    digests = [digest for of, _, digest in reported if _without_docker_hub(of) == repository]
    if not digests:
        raise ReleaseError(f"docker does not report a digest of {name} after it was pushed")
    return digests[-1]


def _without_docker_hub(repository: str) -> str:
    """Return the name of a repository as docker reports it, which leaves out the host of Docker Hub."""
    return re.sub(r"^(index\.)?docker\.io/", "", repository)


def values(registry: str, flavour: str, digests: Mapping[tuple[str, str], str]) -> str:
    """Return a values file that names every image by its digest."""
    chosen: dict[str, Any] = {"registry": registry, "flavour": flavour}
    for service in SERVICES:
        chosen[service] = {"digest": digests[service, "cpu" if service in WITHOUT_GPUS else flavour]}
    text = yaml.safe_dump({"images": chosen}, sort_keys=False)
    if flavour == "gpu":
        text += f"# With rewarder.gpus above 0: images.rewarder.digest: {digests['rewarder', 'gpu']}\n"
    return text


def install_command(registry: str, flavours: Sequence[str], out: Path) -> str:
    """Return a command that installs the release, with GPUs if there are images for them."""
    flavour, settings = ("gpu", "") if "gpu" in flavours else ("cpu", " --set trainer.gpus=0 --set generator.gpus=0")
    path = out / f"values-images-{flavour}.yaml"
    return f"helm install headrace oci://{registry}/charts/headrace --version {VERSION} -f {path}{settings}"


def package(out: Path) -> Path:
    """Write the chart's archive and return its path."""
    helm = _helm()
    return Path(helm.chart.package(ROOT / "deploy" / "helm" / "headrace", destination=out))


def push_chart(archive: Path, registry: str, *, plain_http: bool) -> str:
    """Push the chart and return its digest."""
    helm = _helm()
    login = Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json"
    try:
        with helm.registry.RegistryClient(
            plain_http=plain_http, credentials_file=login if login.exists() else None
        ) as client:
            client.push(archive, f"oci://{registry}/charts")
            return str(client.resolve(f"{registry}/charts/headrace:{VERSION}")["digest"])
    except helm.HelmError as error:
        raise ReleaseError(f"the chart could not be pushed to oci://{registry}/charts: {error}") from error


def docker(*words: str, is_shown: bool = True) -> str:
    """Run docker in the repository's root. Return its output, or an empty string if the output ``is_shown``.

    Raises:
        ReleaseError: docker is missing, or it failed.
    """
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}  # Docker Engine before 23 needs this to use BuildKit
    stdout = None if is_shown else subprocess.PIPE
    try:
        done = subprocess.run(["docker", *words], cwd=ROOT, env=environment, stdout=stdout, text=True, check=False)
    except FileNotFoundError as error:
        raise ReleaseError("there is no docker in PATH") from error
    if done.returncode:
        raise ReleaseError(f"`docker {' '.join(words)}` ended with status {done.returncode}")
    return done.stdout or ""


def revision() -> str:
    """Return the current git commit; "unknown" outside of a git repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _helm() -> Any:
    try:
        import helm_python.chart
        import helm_python.registry
    except ModuleNotFoundError as error:
        raise ReleaseError("the chart needs Helm; in this directory, run pip install -e '.[deploy]'") from error
    return helm_python


if __name__ == "__main__":
    sys.exit(main())
