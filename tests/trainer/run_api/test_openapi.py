"""Schemathesis against the run API: every response matches the OpenAPI document, for valid and invalid requests."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.schema_check import check_schema
from tests.trainer.api_rig import KEY
from tests.trainer.service_rig import Start, wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")


@pytest.mark.timeout(600)
def test_every_answer_is_one_that_the_openapi_document_promises(
    start: Start, run: dict[str, Any], tmp_path: Path
) -> None:
    service = start(
        FAKE_RANK_PLAN="finish",
        HF_HUB_OFFLINE="1",
        HEADRACE_UPLOADS_DIR=str(tmp_path / "uploads"),
        HEADRACE_CODE_UPLOADS_DIR=str(tmp_path / "code"),
    )
    runs = [service.submit(run | {"name": name}) for name in ("first", "second", "third")]
    # The events of an unfinished run are a stream without an end.
    wait_until(lambda: {service.status(run_id) for run_id in runs} == {"finished"})
    check_schema(f"http://127.0.0.1:{service.port}", KEY, tmp_path)
    assert "Traceback" not in service.log()
