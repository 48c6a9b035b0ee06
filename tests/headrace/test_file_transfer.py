"""Uploads and downloads with an API that is played. tests/trainer/run_api has the same with the real one."""

import fcntl
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from headrace import file_transfer
from headrace.api_connection import ApiConnection, ServiceAwayError
from headrace.file_transfer import download, files_in, upload
from shared.errors import UserError

pytestmark = pytest.mark.unit

WEIGHTS = bytes(range(256)) * 100


class PlayedApi:
    """An API that has a model of one file, and calls ``halfway`` after half of it."""

    def __init__(self, name: str, *, halfway: Callable[[], object] = lambda: None) -> None:
        self._file = {"path": name, "size": len(WEIGHTS), "sha256": hashlib.sha256(WEIGHTS).hexdigest()}
        self._halfway = halfway
        self.num_streams = 0

    def request(self, *_given: Any, **_more: Any) -> dict[str, Any]:
        return {"files": [self._file]}

    def stream_bytes(self, _path: str, *, params: Any, first: int, take: Callable[[bytes], object]) -> None:
        del params
        self.num_streams += 1
        if first < len(WEIGHTS) // 2:
            take(WEIGHTS[first : len(WEIGHTS) // 2])
        self._halfway()
        take(WEIGHTS[max(first, len(WEIGHTS) // 2) :])


class TakingApi:
    """An API that takes an upload of one file, and calls ``before_first_piece`` before it takes the first piece."""

    def __init__(self, *, before_first_piece: Callable[[], object]) -> None:
        self._before_first_piece = before_first_piece
        self.received = b""
        self.num_pieces = 0

    def request(self, method: str, _path: str, *, content: bytes = b"", **more: Any) -> dict[str, Any]:
        if method == "PUT":
            self.num_pieces += 1
            if self.num_pieces == 1:
                self._before_first_piece()
            self.received += content
        is_whole = self.received == WEIGHTS
        if method == "PUT":
            return {"received": len(self.received), "is_whole": is_whole}
        (file,) = more["json"]["files"]
        files = [{"sha256": file["sha256"], "received": len(self.received), "is_whole": is_whole}]
        return {"upload_id": "1", "path": "/uploads/1", "is_complete": is_whole, "files": files}


def fetch(api: PlayedApi, directory: Path) -> Path:
    return download(cast("ApiConnection", api), "/v1/runs/run-a/model", directory)


@pytest.mark.parametrize("name", ["m" * 255, "\u00e9" * 127, "\U0001f600" * 63])
def test_a_file_may_have_the_longest_name_of_a_file_system(tmp_path: Path, name: str) -> None:
    fetch(PlayedApi(name), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: WEIGHTS}


def test_a_second_download_into_a_directory_waits_for_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_half, second_waits = threading.Event(), threading.Event()
    lock = fcntl.flock

    def halfway() -> None:
        is_half.set()
        assert second_waits.wait(120)

    def noted(*given: Any) -> None:
        if is_half.is_set():
            second_waits.set()
        lock(*given)

    monkeypatch.setattr(fcntl, "flock", noted)
    first, second = PlayedApi("model", halfway=halfway), PlayedApi("model", halfway=second_waits.set)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(fetch, first, tmp_path)
        assert is_half.wait(120)
        threads.submit(fetch, second, tmp_path).result(timeout=120)
        slow.result(timeout=120)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model": WEIGHTS}
    assert (first.num_streams, second.num_streams) == (1, 0)


class Clock:
    """Stands for the module ``time``: nothing takes time but what moves the clock on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _seconds: float) -> None:
        """Return at once."""

    def fall_silent(self) -> None:
        """Do what a request does whose connection is lost: wait for two minutes, and fail."""
        self.now_s += 120.0
        raise ServiceAwayError("the run API does not answer within 120 s")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(file_transfer, "time", clock)
    return clock


def test_a_download_whose_connection_falls_silent_for_longer_than_its_patience_goes_on(
    tmp_path: Path, clock: Clock
) -> None:
    def halfway() -> None:
        if api.num_streams == 1:
            clock.fall_silent()

    api = PlayedApi("model", halfway=halfway)
    fetch(api, tmp_path)
    assert (tmp_path / "model").read_bytes() == WEIGHTS
    assert api.num_streams == 2


def test_an_upload_whose_connection_falls_silent_for_longer_than_its_patience_goes_on(
    tmp_path: Path, clock: Clock
) -> None:
    api = TakingApi(before_first_piece=clock.fall_silent)
    (tmp_path / "model").write_bytes(WEIGHTS)
    assert upload(cast("ApiConnection", api), tmp_path / "model") == "/uploads/1/model"
    assert (api.received, api.num_pieces) == (WEIGHTS, 2)


def test_a_transfer_with_an_api_that_stays_silent_ends(tmp_path: Path, clock: Clock) -> None:
    api = PlayedApi("model", halfway=clock.fall_silent)
    with pytest.raises(ServiceAwayError, match="does not answer"):
        fetch(api, tmp_path)
    assert api.num_streams == 2


def test_a_directory_with_a_link_to_nothing_is_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "5b")
    with pytest.raises(UserError, match=r"model\.safetensors is a link to a file that is not there"):
        list(files_in(tmp_path))
