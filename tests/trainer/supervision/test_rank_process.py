"""A child process whose output is logged and quoted, and which can be stopped and killed."""

import os
import sys
from pathlib import Path

import pytest

from services.trainer.supervision.rank_process import RankProcess, last_line
from shared.errors import UserError
from tests.trainer.api_rig import wait_until
from tests.trainer.rank_rig import is_alive

pytestmark = pytest.mark.unit


async def start(code: str, log: Path) -> RankProcess:
    return await RankProcess.start([sys.executable, "-S", "-c", code], log=log, environment=os.environ, cpus=None)


async def test_output_is_appended_over_restarts(tmp_path: Path) -> None:
    log = tmp_path / "run" / "rank.log"
    for word in ("first", "second"):
        rank = await start(f"import sys; print({word!r}); sys.stderr.write('!\\n')", log)
        assert await rank.wait() == 0
    assert sorted(log.read_text().split()) == ["!", "!", "first", "second"]


async def test_the_exit_status_shows_how_the_process_ended(tmp_path: Path) -> None:
    assert await (await start("raise SystemExit(3)", tmp_path / "log")).wait() == 3
    assert await (await start("import os; os.kill(os.getpid(), 11)", tmp_path / "log")).wait() == -11


async def test_a_kill_takes_the_children_along(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    rank = await start(code, tmp_path / "log")
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert await rank.wait_for(0.02) is None
    child = int((tmp_path / "child").read_text())
    rank.kill()
    assert await rank.wait() == -9
    await wait_until(lambda: not is_alive(child))


async def test_stopping_or_killing_what_has_ended_is_harmless(tmp_path: Path) -> None:
    rank = await start("", tmp_path / "log")
    assert await rank.wait() == 0
    rank.kill()
    assert await rank.stop(grace_s=1.0) == 0


async def test_a_command_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="/nowhere/rank"):
        await RankProcess.start(["/nowhere/rank"], log=tmp_path / "log", environment={}, cpus=None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one\ntwo\n\n  \n", "two"),
        ('{"level": "ERROR", "message": "no\\nmodel"}\n', "no model"),
        ('{"level": "ERROR"}\n', '{"level": "ERROR"}'),
        ("[1]\n", "[1]"),
        ("x" * 600, "x" * 500),
        ("a" * 40_000 + "\nend", "end"),
    ],
)
def test_the_last_line_is_quoted_as_a_person_would(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == line


def test_a_log_that_is_not_there_or_not_text_has_no_last_line(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == ""
    (tmp_path / "log").write_bytes(b"\xff\xfe\n")
    assert last_line(tmp_path / "log") == "\ufffd\ufffd"
