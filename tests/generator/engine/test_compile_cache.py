"""Replicas on one machine do not read a cache that another one is writing or has left incomplete."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.generator.engine import vllm_environment
from services.generator.engine.vllm_environment import claim_compile_cache

pytestmark = pytest.mark.unit

HOLDER = """
import os, sys
from services.generator.engine.vllm_environment import claim_compile_cache
print(claim_compile_cache(os.environ), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:  # a process keeps its claims until it ends; a test must not
    yield
    while vllm_environment.open_locks:
        os.close(vllm_environment.open_locks.pop())


def test_each_replica_has_a_directory_and_one_that_ended_leaves_its_own_to_the_next(tmp_path: Path) -> None:
    environment = {"VLLM_CACHE_ROOT": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        assert first.stdout.readline().strip() == str(tmp_path), "a single replica uses vLLM's default"
        second, third = dict(environment), dict(environment)
        assert claim_compile_cache(second) == tmp_path / "replica-1"
        assert claim_compile_cache(third) == tmp_path / "replica-2"
        assert second == {"VLLM_CACHE_ROOT": str(tmp_path / "replica-1")}
        first.send_signal(signal.SIGKILL)
    assert claim_compile_cache(dict(environment)) == tmp_path


def test_it_is_where_vllm_looks_by_default(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    assert claim_compile_cache(environment) == tmp_path / "vllm"
    assert environment["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")


@pytest.mark.parametrize(("content", "stays"), [("{(1, 2, 'a'): 'b'}", True), ("{(1, 2, 'a'): 'b", False), ("", False)])
def test_an_index_that_was_left_half_written_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, *, stays: bool
) -> None:
    index = tmp_path / "torch_compile_cache" / "0a1b" / "rank_0_0" / "backbone" / "vllm_compile_cache.py"
    index.parent.mkdir(parents=True)
    index.write_text(content)
    claim_compile_cache({"VLLM_CACHE_ROOT": str(tmp_path)})
    assert index.exists() is stays
    assert ("is incomplete" in caplog.text) is not stays


def test_a_place_that_cannot_be_written_costs_the_cache_and_not_the_generator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "file" / "below")}
    assert claim_compile_cache(environment) is None
    assert "cannot be written" in caplog.text


def test_an_index_that_cannot_be_read_does_not_keep_a_generator_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = tmp_path / "torch_compile_cache" / "0a1b" / "rank_0_0" / "backbone" / "vllm_compile_cache.py"
    index.mkdir(parents=True)
    assert claim_compile_cache({"VLLM_CACHE_ROOT": str(tmp_path)}) == tmp_path
    assert f"{index} cannot be read or removed: Is a directory" in caplog.text
