"""RDMA without the right to lock memory is reported at the start, and not by NCCL in the middle of a step."""

import logging
import resource
from pathlib import Path

import pytest

from services.trainer.ranks.rank_group import warn_of_little_locked_memory

pytestmark = pytest.mark.unit


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("rdma_cm", "uverbs0"):
        (tmp_path / name).touch()
    return tmp_path


def limit_to(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_MEMLOCK: (limit, limit)}.__getitem__)


def test_a_memory_limit_is_reported_with_a_remedy(
    devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_to(monkeypatch, 8 * 1024 * 1024)
    with caplog.at_level(logging.WARNING):
        warn_of_little_locked_memory({}, devices=devices)
    assert "may lock only 8192 KiB" in caplog.text
    assert "LimitMEMLOCK=infinity" in caplog.text


@pytest.mark.parametrize("environment", [{"NCCL_IB_DISABLE": "1"}, {"LOCAL_RANK": "3"}])
def test_it_is_reported_once_per_machine_and_only_where_rdma_would_be_used(
    environment: dict[str, str], devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_to(monkeypatch, 65536)
    warn_of_little_locked_memory(environment, devices=devices)
    assert caplog.text == ""
    warn_of_little_locked_memory({"LOCAL_RANK": "0", "NCCL_IB_DISABLE": "0"}, devices=devices)
    assert "may lock only 64 KiB" in caplog.text


def test_nothing_is_reported_without_a_limit_or_without_devices(
    devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_to(monkeypatch, 65536)
    warn_of_little_locked_memory({}, devices=devices / "nothing")
    (devices / "none").mkdir()
    warn_of_little_locked_memory({}, devices=devices / "none")
    limit_to(monkeypatch, resource.RLIM_INFINITY)
    warn_of_little_locked_memory({}, devices=devices)
    assert caplog.text == ""
