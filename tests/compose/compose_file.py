"""Reads deploy/docker-compose.yml as Compose does: substitutes variables, merges anchors, chooses profiles."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILE = DEPLOY / "docker-compose.yml"
HARDWARE = ("gpu", "single-gpu", "cpu")
PROFILE_CHECK = "this-needs-a-profile-gpu-or-single-gpu-or-cpu-see-.env.example"
"""A service without containers. Compose prints its name if no profile starts the stack."""
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z][A-Z0-9_]*)(?P<how>:?-)(?P<default>(?:[^{}]|\{[^{}]*\})*)\}")


def load(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file with ``environment`` in its variables."""
    given = environment or {}

    def value(found: "re.Match[str]") -> str:
        there = given.get(found["name"])
        return found["default"] if there is None or (found["how"] == ":-" and not there) else there

    def replaced(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: replaced(item) for key, item in cast("dict[str, Any]", node).items()}
        if isinstance(node, list):
            return [replaced(item) for item in cast("Any", node)]
        if not isinstance(node, str):
            return node
        text = VARIABLE.sub(value, node)
        assert "${" not in text, "a variable without a default: a first run would need more than .env"
        return text

    parsed: dict[str, Any] = replaced(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    return parsed


def variables() -> dict[str, set[str]]:
    """Return every variable of the file with its defaults."""
    found: dict[str, set[str]] = {}
    for match in VARIABLE.finditer(FILE.read_text(encoding="utf-8")):
        found.setdefault(match["name"], set()).add(match["default"])
    return found


def services(profile: str, *more: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the services that a profile starts."""
    everything: dict[str, dict[str, Any]] = load(environment)["services"]
    chosen = {profile, *more}
    return {
        name: service
        for name, service in everything.items()
        if name != PROFILE_CHECK and (not service.get("profiles") or chosen & set(service["profiles"]))
    }


def networks(service: Mapping[str, Any]) -> set[str]:
    """Return the networks of a service."""
    if "network_mode" in service:
        return set()
    return set(service["networks"])


def seconds(duration: str) -> float:
    """Return a duration such as ``90s`` or ``1m30s``."""
    units = {"h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+)([hms])", duration)
    assert "".join(f"{number}{unit}" for number, unit in parts) == duration
    return float(sum(int(number) * units[unit] for number, unit in parts))
