"""A service that cannot be started now is started later; the launcher and the other services go on meanwhile."""

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from headrace.local.hang_watch import Question
from headrace.local.redis_repair import Damage, why_unreadable
from headrace.local.supervised_process import ServiceSpec, SupervisedProcess
from shared.errors import UserError
from tests.eventually import eventually

pytestmark = pytest.mark.unit

RUNS_ON = "import time; time.sleep(600)"
CRASHES = "raise SystemExit(1)"


@contextlib.asynccontextmanager
async def supervised(
    log_path: Path, *, program: str, said: list[str], why_hopeless: Callable[[str], str] = lambda _: ""
) -> AsyncGenerator[SupervisedProcess]:
    """Keep a program alive until the block ends."""
    service = SupervisedProcess(
        ServiceSpec(
            name="trainer",
            command=(sys.executable, "-I", "-S", "-c", program),
            environment={},
            log_path=log_path,
            is_essential=True,
            stop_timeout_s=60.0,
            question=Question(1),
            why_hopeless=why_hopeless,
        ),
        say=said.append,
        on_start=lambda: None,
    )
    keeping = asyncio.create_task(service.keep_alive(), name="keep it alive")
    try:
        yield service
        assert not keeping.done(), "the launcher would have ended all services"
    finally:
        await service.end(hurry=asyncio.Event())
        assert await keeping is None


def kill(service: SupervisedProcess) -> None:
    assert service.process is not None
    os.kill(service.process.pid, 9)


async def test_a_service_that_cannot_be_started_now_is_started_when_it_can_be(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    said: list[str] = []
    async with supervised(logs / "trainer.log", program=RUNS_ON, said=said) as service:
        await eventually(lambda: service.num_starts == 1 and service.process)
        shutil.rmtree(logs)
        logs.write_text("a file, in which no log can be opened")
        kill(service)
        await eventually(lambda: any("trainer cannot be started (" in line for line in said))
        assert "starting it again in" in said[-1]
        logs.unlink()
        await eventually(lambda: service.num_starts == 2)
    assert (logs / "trainer.log").exists(), "the directory is made again"


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), UserError("no server")])
async def test_a_service_is_started_again_if_it_cannot_be_found_out_whether_that_is_hopeless(
    tmp_path: Path, error: Exception
) -> None:
    def fails(_: str) -> str:
        raise error

    said: list[str] = []
    async with supervised(tmp_path / "trainer.log", program=CRASHES, said=said, why_hopeless=fails) as service:
        await eventually(lambda: service.num_starts == 2)


def test_a_base_file_of_redis_that_is_missing_is_named(tmp_path: Path) -> None:
    append_only = tmp_path / "redis" / "appendonlydir"
    append_only.mkdir(parents=True)
    (append_only / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")
    missing = append_only / "appendonly.aof.1.base.rdb"
    assert str(Damage(missing, is_base=True, num_good_bytes=0, later=())) == f"{missing} is missing"
    assert why_unreadable(tmp_path / "redis", last_words="").startswith(f"{missing} is missing. `headrace up --repair")
