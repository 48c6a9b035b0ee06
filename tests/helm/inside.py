"""A container of the chart as its process sees it: variables as set by the kubelet, and mounts as local directories."""

from pathlib import Path
from typing import Any

import pytest

from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from services.trainer.settings import TrainerSettings
from shared.settings import ServiceSettings
from tests.helm.chart import Object, environment, mounts, workloads

SETTINGS: dict[str, type[ServiceSettings]] = {
    "trainer": TrainerSettings,
    "trainer-node": TrainerSettings,
    "generator": GeneratorSettings,
    "rewarder": RewarderSettings,
    "sessions": SessionsSettings,
}
PODS = {"trainer": "headrace-trainer-0", "trainer-node": "headrace-trainer-node-1",
        "generator": "headrace-generator-0", "rewarder": "headrace-rewarder-5d7f-x2x4z",
        "sessions": "headrace-sessions-7c9d-b8k2q"}  # fmt: skip


class Inside:
    """A container's variables, with its mounts as directories on this machine."""

    def __init__(self, workload: Object, *, pod: str, root: Path) -> None:
        given = environment(workload, pod=pod)
        self.variables: dict[str, str] = {}
        for path, mount in mounts(workload).items():
            here = root / path.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
            for item in mount["volume"].get("secret", {}).get("items", []):
                (here / item["path"]).write_text(f"content-of-{item['path']}\n")
        for name, text in given.items():
            self.variables[name] = ":".join(
                f"{root}{part}"
                if any(part == path or part.startswith(f"{path}/") for path in mounts(workload))
                else part
                for part in text.split(":")
            )

    def settings(self, kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch) -> Any:
        for name, text in self.variables.items():
            monkeypatch.setenv(name, text)
        return kind()


def inside(objects: list[Object], workload: str, root: Path) -> Inside:
    return Inside(workloads(objects)[workload], pod=PODS[workload], root=root)
