"""The files of a state directory, and their permissions."""

import os
import stat
from pathlib import Path

import pytest

from headrace.local.state_dir import Endpoint, ProcessMark, StateDir, choose_state_dir, write_privately
from shared.errors import UserError

pytestmark = pytest.mark.unit


def test_a_key_is_made_once_and_shown_by_no_repr(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.make()
    keys = state.keys()
    assert state.keys() == keys
    assert len({keys.api_key, keys.internal_key, keys.redis_password}) == 3
    assert min(len(key) for key in (keys.api_key, keys.internal_key, keys.redis_password)) >= 32
    assert keys.api_key not in repr(keys)


def test_an_emptied_key_file_is_filled_again(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.make()
    state.api_key_file.write_text("\n")
    assert state.keys().api_key


def test_the_directory_is_only_for_its_owner_even_if_it_existed_before(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    StateDir(tmp_path / "state").make()
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_private_file_is_private_from_the_first_moment(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_privately(tmp_path / "key", "secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_private_file_is_on_the_disk_before_it_replaces_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endpoint.json").write_text("old")
    seen: list[tuple[str, int]] = []

    def fsync(descriptor: int) -> None:
        seen.append(((tmp_path / "endpoint.json").read_text(), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    write_privately(tmp_path / "endpoint.json", "longer")
    assert seen == [("old", 6)]


def test_a_second_lock_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.make()
    with state.lock(), pytest.raises(UserError, match=f"already running on {tmp_path}"):
        state.lock()
    state.lock().close()


def test_a_directory_that_cannot_be_made_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be used.*--state-dir"):
        StateDir(tmp_path / "file" / "state").make()


def test_an_endpoint_is_read_as_it_was_written_and_forgotten(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    endpoint = Endpoint(
        api_url="http://127.0.0.1:8400",
        rewarder_url="http://127.0.0.1:8401",
        sessions_url="http://127.0.0.1:8404",
        generator_urls=("http://127.0.0.1:8402", "http://127.0.0.1:8403"),
        launcher=ProcessMark(10, 1000),
        processes={"redis": ProcessMark(11, 1001)},
        is_ready=True,
        end_patience_s=360.0,
    )
    assert state.endpoint() is None
    state.write_endpoint(endpoint)
    assert state.endpoint() == endpoint
    assert state.redis_url() == ""
    state.write_redis_url("redis://:secret@127.0.0.1:6379/0")
    assert state.redis_url() == "redis://:secret@127.0.0.1:6379/0"
    state.forget_endpoint()
    assert state.endpoint() is None
    assert state.redis_url() == ""


@pytest.mark.parametrize("text", ["", "[]", '{"api_url": 1}', "{"])
def test_a_damaged_endpoint_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    with pytest.raises(UserError, match=r"endpoint.json cannot be read .*; delete it"):
        StateDir(tmp_path).endpoint()


def test_the_flag_wins_over_the_variable_and_that_over_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_STATE_DIR", raising=False)
    assert choose_state_dir(None) == tmp_path / ".headrace"
    monkeypatch.setenv("HEADRACE_STATE_DIR", "/elsewhere")
    assert choose_state_dir(None) == Path("/elsewhere")
    assert choose_state_dir("here") == tmp_path / "here"
