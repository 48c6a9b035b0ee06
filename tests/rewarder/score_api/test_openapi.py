"""Schemathesis against the running rewarder: every response matches its OpenAPI document."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rewarder.conftest import RewarderProcess
from tests.schema_check import check_schema

pytestmark = pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")


@pytest.fixture
def rewarder(redis_url: str, tmp_path: Path) -> Iterator[RewarderProcess]:
    rewarder = RewarderProcess(redis_url, tmp_path / "rewarder.log")
    try:
        rewarder.wait_until_ready()
        yield rewarder
        assert rewarder.stop() == 0, rewarder.log()
    finally:
        if rewarder.process.poll() is None:
            rewarder.kill()


@pytest.mark.timeout(600)
def test_every_answer_is_one_that_the_openapi_document_promises(rewarder: RewarderProcess, tmp_path: Path) -> None:
    check_schema(rewarder.url(""), "key-of-the-test", tmp_path)
    assert "Traceback" not in rewarder.log()
