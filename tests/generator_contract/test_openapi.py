"""Schemathesis against generators: every response matches their OpenAPI document."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.generator_contract.implementations import API_KEY, GeneratorProcess, Implementation
from tests.generator_contract.played_trainer import PlayedTrainer
from tests.schema_check import check_schema

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis"),
    pytest.mark.timeout(900),
]


async def test_every_answer_is_one_that_the_openapi_document_promises(
    trainer: PlayedTrainer, generator: GeneratorProcess, implementation: Implementation, tmp_path: Path
) -> None:
    if implementation.name == "simulated over gloo":
        pytest.skip("receives weights otherwise, and answers requests as the simulated one does")
    await trainer.push(1)
    await trainer.require(1)
    await eventually(generator.is_ready)
    await asyncio.to_thread(check_schema, generator.url, API_KEY, tmp_path)
    assert generator.is_alive()
    assert "Traceback" not in generator.said()
