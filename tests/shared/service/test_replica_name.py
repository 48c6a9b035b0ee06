"""The default name of a replica."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from shared.service import replica_name as module
from shared.service.replica_name import replica_name

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    replica_name.cache_clear()
    yield
    replica_name.cache_clear()


def _host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)

    def address(_host: str) -> str:
        return "10.214.0.3"

    monkeypatch.setattr(socket, "gethostbyname", address)


@pytest.fixture(autouse=True)
def resolvers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "resolv.conf"
    path.write_text("search headrace.local\nnameserver 127.0.0.11\noptions ndots:0\n")
    monkeypatch.setattr(module, "_RESOLVERS", path)
    return path


def _getent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    command = tmp_path / "getent"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_container_has_the_name_that_dns_has_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _host(monkeypatch, "93dce42cb9c8")
    _getent(
        monkeypatch,
        tmp_path,
        '[ "$*" = "-s hosts:dns hosts 10.214.0.3" ] && echo "$4      headrace-generator-2.headrace_default"',
    )
    assert replica_name() == "headrace-generator-2"


@pytest.mark.parametrize("script", ["exit 2", "true", "echo 10.214.0.3"])
def test_it_is_its_host_where_dns_has_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    _host(monkeypatch, "93dce42cb9c8")
    _getent(monkeypatch, tmp_path, script)
    assert replica_name() == "93dce42cb9c8"


def test_only_the_network_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tasks of a swarm's service differ only after the first dot."""
    _host(monkeypatch, "93dce42cb9c8")
    _getent(monkeypatch, tmp_path, "echo 10.214.0.3 headrace_generator.1.k3j2x9.net")
    assert replica_name() == "headrace_generator.1.k3j2x9"


def test_only_the_engine_s_name_service_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resolvers: Path
) -> None:
    """Another one may have one name for several containers, or ``localhost``."""
    _host(monkeypatch, "93dce42cb9c8")
    _getent(monkeypatch, tmp_path, "echo 10.214.0.3 worker.example.org")
    resolvers.write_text("nameserver 10.0.0.2\n")
    assert replica_name() == "93dce42cb9c8"
    resolvers.unlink()
    replica_name.cache_clear()
    assert replica_name() == "93dce42cb9c8"


def test_a_host_with_a_name_makes_no_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _host(monkeypatch, "generator-7")
    _getent(monkeypatch, tmp_path, "echo 10.214.0.3 other")
    assert replica_name() == "generator-7"


def test_replicas_on_one_host_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one name they would take over each other's registration and unfinished groups."""
    _host(monkeypatch, "gpu-host")
    monkeypatch.delenv("HEADRACE_REPLICA_ID", raising=False)
    assert [GeneratorSettings(port=port).name for port in (8000, 8001)] == ["gpu-host", "gpu-host-8001"]
    assert [RewarderSettings(port=port).name for port in (8000, 8001)] == ["gpu-host", "gpu-host-8001"]
    replica_name.cache_clear()
    _host(monkeypatch, "93dce42cb9c8")  # a container without Docker's DNS, such as a rented one
    assert RewarderSettings(port=8001).name == "93dce42cb9c8-8001"
    _host(monkeypatch, "gpu-host")
    assert SessionsSettings(port=8300).name == "sessions-gpu-host-8300"
    assert GeneratorSettings(port=8001, replica_id="generator-b").name == "generator-b"
