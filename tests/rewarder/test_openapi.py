"""Schemathesis against the running rewarder: whatever its OpenAPI document allows or forbids, it answers as it says."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import RedisServer
from tests.rewarder.conftest import RewarderProcess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")

KEY = {"Authorization": "Bearer key-of-the-test"}
MAX_EXAMPLES, SEED = 15, 1
NOT_FOR_US = "positive_data_acceptance"
"""No schema can say that lists are equally long, or that a function exists: such bodies are 422 and documented so."""


@pytest.fixture
def rewarder(redis_server: RedisServer, tmp_path: Path) -> Iterator[RewarderProcess]:
    rewarder = RewarderProcess(redis_server.url, tmp_path / "rewarder.log")
    try:
        rewarder.wait_until_ready()
        yield rewarder
        assert rewarder.stop() == 0, rewarder.log()
    finally:
        if rewarder.process.poll() is None:
            rewarder.kill()


@pytest.mark.timeout(600)
def test_every_answer_is_one_that_the_openapi_document_promises(rewarder: RewarderProcess, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", rewarder.url("/openapi.json"), "--header", f"Authorization: {KEY['Authorization']}"),
            *("--checks", "all", "--exclude-checks", NOT_FOR_US, "--continue-on-failure"),
            *("--max-examples", str(MAX_EXAMPLES), "--seed", str(SEED), "--generation-deterministic"),
            *("--request-timeout", "60", "--suppress-health-check", "all", "--no-color"),
        ],
        cwd=tmp_path,
        env={**os.environ, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    paths = httpx.get(rewarder.url("/openapi.json"), headers=KEY, trust_env=False, timeout=120).json()["paths"]
    assert f"Tested: {sum(map(len, paths.values()))}\n" in done.stdout, done.stdout
    assert "Traceback" not in rewarder.log()
