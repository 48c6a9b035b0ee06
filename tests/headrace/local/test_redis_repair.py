"""A damaged append-only file of the embedded Redis: the message says what to do, and doing it works."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from headrace.cli import command_line as cli
from headrace.local import process_table
from headrace.local.embedded_redis import server_binary
from headrace.local.redis_repair import find_damage, repair, why_unreadable
from tests.conftest import RedisServer
from tests.headrace.launcher_rig import PATIENCE_S, LauncherRig, wait_for

BAD_FORMAT = "Bad file format reading the append only file appendonly.aof.1.incr.aof: make a backup"


@contextlib.contextmanager
def server(directory: Path) -> Generator["redis.Redis"]:
    """Run a server on a directory, so that it writes append-only files there."""
    directory.mkdir(exist_ok=True)
    running = RedisServer(directory)
    running.start()
    try:
        with redis.Redis.from_url(running.url) as client:
            yield client
    finally:
        running.kill()


def write(client: "redis.Redis", name: str, *, count: int) -> None:
    for number in range(count):
        client.set(f"{name}-{number}", os.urandom(50))
    written: Any = cast("Any", client).execute_command("WAITAOF", 1, 0, 0)
    assert written[0] == 1, "the file has all of it"


def damage(file: Path, *, at: float) -> int:
    """Overwrite a part of a file with zeros; return its offset."""
    content = bytearray(file.read_bytes())
    begin = int(len(content) * at)
    content[begin : begin + 200] = bytes(200)
    file.write_bytes(content)
    return begin


def newest(directory: Path, pattern: str) -> Path:
    (found,) = (directory / "appendonlydir").glob(pattern)
    return found


def test_a_launcher_whose_redis_file_is_damaged_says_what_to_do_and_that_brings_it_up(rig: LauncherRig) -> None:
    launcher = rig.launch_until_ready()
    with redis.Redis.from_url(rig.state.redis_url()) as client:
        write(client, "early", count=100)
        write(client, "late", count=300)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=PATIENCE_S) == 0
    file = newest(rig.state.redis, "*.incr.aof")
    begin, as_it_was = damage(file, at=0.5), file.read_bytes()

    refused = rig.launch()
    assert refused.wait(timeout=PATIENCE_S) == 1
    said = rig.output()
    assert f"redis gave up: {file} is damaged at byte" in said
    assert f"`headrace up --repair-redis --state-dir {rig.state.path}` keeps a copy of the files" in said
    assert "headrace cannot run without redis" in said
    assert "starting it again" not in said

    repaired = rig.launch(repairs_redis=True)
    rig.wait_until_ready(repaired)
    assert f"{file} is damaged at byte" in rig.output()
    assert "and was cut there; the original files are kept in" in rig.output()
    with redis.Redis.from_url(rig.state.redis_url()) as client:
        assert client.exists(*(f"early-{number}" for number in range(100))) == 100
        assert client.exists("late-299") == 0
    (aside,) = rig.state.redis.glob("appendonlydir.damaged-*")
    assert (aside / file.name).read_bytes() == as_it_was
    assert begin - 200 < int(rig.output().rpartition("damaged at byte ")[2].split()[0]) <= begin


def test_a_redis_that_dies_on_a_damaged_file_while_all_runs_ends_the_launcher_with_what_to_do(
    rig: LauncherRig,
) -> None:
    launcher = rig.launch_until_ready()
    with redis.Redis.from_url(rig.state.redis_url()) as client:
        write(client, "key", count=300)
    damage(newest(rig.state.redis, "*.incr.aof"), at=0.5)
    processes = rig.processes_of(launcher)
    os.kill(rig.endpoint().processes["redis"].pid, signal.SIGKILL)
    assert launcher.wait(timeout=PATIENCE_S) == 1
    assert "`headrace up --repair-redis" in rig.output()
    assert not [process for process in processes if process_table.is_alive(process)]


def test_a_torn_end_is_left_to_the_server_which_starts_on_it(tmp_path: Path) -> None:
    with server(tmp_path / "redis") as client:
        write(client, "key", count=300)
    file = newest(tmp_path / "redis", "*.incr.aof")
    os.truncate(file, file.stat().st_size - 20)
    assert why_unreadable(tmp_path / "redis", last_words="Failed listening on port 6379") == ""
    with server(tmp_path / "redis") as client:
        assert client.exists("key-298", "key-299") == 1


def test_damage_at_any_byte_of_a_record_is_found_when_the_server_ends(tmp_path: Path) -> None:
    with server(tmp_path / "redis") as client:
        write(client, "key", count=20)
    file = newest(tmp_path / "redis", "*.incr.aof")
    intact = file.read_bytes()
    begin = intact.index(b"*3\r\n$3\r\n", len(intact) // 2)
    arguments = ["--dir", str(tmp_path / "redis"), "--appendonly", "yes", "--port", "0", "--unixsocket", "s"]
    for offset in range(begin, intact.index(b"key-", begin)):
        file.write_bytes(intact[:offset] + bytes(200) + intact[offset + 200 :])
        ended = subprocess.run([server_binary(), *arguments], capture_output=True, text=True, timeout=60, check=False)
        last_words = ended.stdout.splitlines()[-1]
        why = why_unreadable(tmp_path / "redis", last_words=last_words)
        assert f"{file} is damaged at byte {begin} of" in why, (offset - begin, last_words)


def test_commands_after_the_damage_are_left_out_and_kept_in_another_file(tmp_path: Path) -> None:
    """An unfinished rewrite leaves two incremental files."""
    directory = tmp_path / "redis"
    with server(directory) as client:
        write(client, "first", count=300)
    first = newest(directory, "*.incr.aof")
    second = first.with_name("appendonly.aof.2.incr.aof")
    second.write_bytes(b"*3\r\n$3\r\nSET\r\n$6\r\nsecond\r\n$1\r\n1\r\n")
    manifest = first.with_name("appendonly.aof.manifest")
    manifest.write_text(manifest.read_text() + f"file {second.name} seq 2 type i\n")
    with server(directory) as client:
        assert client.get("second") == b"1"
    damage(first, at=0.9)
    found = find_damage(directory)
    assert found is not None
    assert (found.file, found.later) == (first, (second.name,))
    assert "continue from their checkpoints" in why_unreadable(directory, last_words=BAD_FORMAT)

    assert "was cut there" in repair(directory)
    with server(directory) as client:
        assert client.exists("first-0", "first-299", "second") == 1
    (aside,) = directory.glob("appendonlydir.damaged-*")
    assert (aside / second.name).exists()


def test_of_a_damaged_base_nothing_is_kept_but_the_copy_and_the_person_knows_it_before(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    with server(directory) as client:
        write(client, "key", count=300)
        client.bgrewriteaof()
        wait_for(lambda: list((directory / "appendonlydir").glob("*.2.base.rdb")), "the rewrite")
        wait_for(lambda: len(list((directory / "appendonlydir").glob("*.rdb"))) == 1, "the old base to go")
    damage(newest(directory, "*.base.rdb"), at=0.5)
    assert "starts with an empty Redis. The records of all runs are lost" in why_unreadable(directory, last_words="")
    assert "Redis starts empty" in repair(directory)
    with server(directory) as client:
        assert client.dbsize() == 0
    (aside,) = directory.glob("appendonlydir.damaged-*")
    assert newest(aside.parent, "../appendonlydir.damaged-*/*.2.base.rdb").stat().st_size > 300 * 50


def test_undamaged_files_are_unchanged(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    assert repair(directory) == "the files of Redis are not damaged"
    with server(directory) as client:
        write(client, "key", count=3)
    before = newest(directory, "*.incr.aof").read_bytes()
    assert repair(directory) == "the files of Redis are not damaged"
    assert newest(directory, "*.incr.aof").read_bytes() == before


def test_a_redis_of_one_s_own_is_not_repaired(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://127.0.0.1:1/0")
    assert cli.main(["up", "--repair-redis"]) == 1
    assert "--repair-redis is for the embedded Redis" in capsys.readouterr().err
