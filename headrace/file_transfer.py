"""Uploads files to a deployment and downloads a run's model. Both continue after a broken connection.

    upload:   hash every file --> POST /v1/uploads --> PUT the missing bytes --> return the path for a run's config
    download: GET .../model --> GET .../model/file from the first missing byte on --> check the hash --> rename

After its last progress, a transfer is retried for a minute from the first failure on. Then the error is raised, and a
later call continues the transfer.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Final

from headrace.api_connection import ApiConnection, HeadraceApiError, ServiceAwayError
from shared.errors import UserError
from shared.files.file_set import MAX_FILES, SetFile, is_hash, why_no_set

OnProgress = Callable[[int, int], object]
"""Called with the number of bytes that are there, and the total."""

_PIECE_BYTES: Final = 8 * 1024 * 1024
_PATIENCE_S, _FIRST_BACKOFF_S, _LAST_BACKOFF_S = 60.0, 0.2, 5.0
_ANSWER_S, _BYTES_HASHED_IN_A_SECOND = 60.0, 100_000_000
_MAX_PART_NAME_BYTES: Final = 200
"""Most bytes of a file's own name in the name of its part: a file name has at most 255 bytes."""
_WORTH_A_RETRY = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
_ANOTHER_CLIENT_IS_AHEAD = ("/problems/no-such-upload", "/problems/wrong-offset")


def upload(api: ApiConnection, path: Path, *, on_progress: OnProgress | None = None) -> str:
    """Upload a file or directory, and return its path on the services' machines.

    Raises:
        UserError: There is nothing to upload, or a file changed in the meantime.
        HeadraceApiError: The API refused the upload, or was unreachable for a minute.
    """
    sources = dict(itertools.islice(files_in(path), MAX_FILES + 1))
    if len(sources) > MAX_FILES:
        raise UserError(f"{path} cannot be uploaded: it has more than {MAX_FILES} files")
    files = [SetFile(name, source.stat().st_size, _hash(source)) for name, source in sources.items()]
    if why := why_no_set(files):
        raise UserError(f"{path} cannot be uploaded: {why}")
    try:
        target = _Upload(api, files, on_progress).send({file.sha256: sources[file.path] for file in files})
    except HeadraceApiError as error:
        raise _about(path, "uploaded", error) from error
    return target if path.is_dir() else f"{target}/{files[0].path}"


def download(api: ApiConnection, where: str, directory: Path, *, on_progress: OnProgress | None = None) -> Path:
    """Download the files of a model, and return the directory.

    Args:
        api: Connections to the run API.
        where: Path of the run's model below the API's URL.
        directory: Where the files are written.
        on_progress: Called with the number of bytes that have arrived, and the total.

    Raises:
        HeadraceApiError: The run has left no model, or the API was unreachable for a minute.
    """
    patience = _Patience()
    while True:
        try:
            listed = api.request("GET", where, timeout_s=600.0)["files"]
            break
        except HeadraceApiError as error:
            patience.wait_or_raise(error)
    files = [SetFile(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in listed]
    if why := why_no_set(files) or next((f"{it.sha256!r} is not a hash" for it in files if not is_hash(it.sha256)), ""):
        raise HeadraceApiError(f"the run API names files that a model cannot have: {why}")
    total, done = sum(file.size for file in files), 0
    for file in files:
        _fetch(api, where, file, directory / file.path, functools.partial(_tell, on_progress, total=total, before=done))
        done += file.size
        _tell(on_progress, done, total=total)
    return directory


class _Upload:
    """The upload of one set of files, with the number of bytes of each file that the services have received.

    Args:
        api: Connections to the run API.
        files: Name, size and SHA-256 hash of each file.
        on_progress: Called with the number of bytes that have arrived, and the total.
    """

    def __init__(self, api: ApiConnection, files: list[SetFile], on_progress: OnProgress | None) -> None:
        self._api = api
        self._files = files
        self._on_progress = on_progress
        self._sizes = {file.sha256: file.size for file in files}
        self._received: dict[str, int] = {}
        self._patience = _Patience()

    def send(self, sources: dict[str, Path]) -> str:
        """Send the missing bytes of all files, and return the directory in which the services keep them.

        Args:
            sources: The local path of each file, by its SHA-256 hash.

        Raises:
            UserError: A file changed in the meantime.
            HeadraceApiError: The API refused the upload, or was unreachable for a minute.
        """
        while True:
            try:
                state = self._begin()
                if state["is_complete"]:
                    return str(state["path"])
                whole = {file["sha256"] for file in state["files"] if file["is_whole"]}
                for sha256, source in sources.items():
                    if sha256 not in whole:
                        self._send_file(str(state["upload_id"]), sha256, source)
            except HeadraceApiError as error:
                if error.problem.get("type") in _ANOTHER_CLIENT_IS_AHEAD:
                    self._patience.spend(error)
                else:
                    self._patience.wait_or_raise(error)

    def _begin(self) -> dict[str, Any]:
        body = {"files": [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in self._files]}
        state = self._api.request("POST", "/v1/uploads", json=body, timeout_s=_ANSWER_S)
        self._note({file["sha256"]: int(file["received"]) for file in state["files"]})
        return state

    def _send_file(self, upload_id: str, sha256: str, source: Path) -> None:
        size, offset = self._sizes[sha256], self._received[sha256]
        with _opened(source) as file:
            file.seek(offset)
            is_whole = False
            while not is_whole:
                data = file.read(min(_PIECE_BYTES, size - offset))
                if not data and offset < size:
                    raise _has_changed(source)
                is_last = offset + len(data) == size
                hashing_s = size / _BYTES_HASHED_IN_A_SECOND if is_last else 0.0
                try:
                    answer = self._api.request(
                        "PUT",
                        f"/v1/uploads/{upload_id}/files/{sha256}",
                        params={"offset": offset},
                        content=data,
                        headers={"Content-Type": "application/octet-stream"},
                        timeout_s=_ANSWER_S + hashing_s,
                    )
                except HeadraceApiError as error:
                    if error.problem.get("type") == "/problems/wrong-hash":
                        raise _has_changed(source) from error
                    raise
                offset, is_whole = int(answer["received"]), bool(answer["is_whole"])
                self._note({sha256: offset})
                if is_last and not is_whole:
                    return

    def _note(self, received: dict[str, int]) -> None:
        before = sum(self._received.values())
        self._received |= received
        if sum(self._received.values()) > before:
            self._patience = _Patience()
        _tell(self._on_progress, sum(self._received.values()), total=sum(self._sizes.values()))


class _Patience:
    """Waits between the tries of a transfer, and gives up a minute after the first failure.

    The time until a failure is noticed does not count. A new object is made after progress.
    """

    def __init__(self) -> None:
        self._until: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S

    def wait_or_raise(self, error: HeadraceApiError) -> None:
        """Wait before the next try. Raise the error if it is not worth a retry, or if the minute is over."""
        if not isinstance(error, ServiceAwayError) and error.status not in _WORTH_A_RETRY:
            raise error
        self.spend(error)

    def spend(self, error: HeadraceApiError) -> None:
        """Wait before the next try, or raise the error if the minute is over."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + _PATIENCE_S
        elif now > self._until:
            raise error
        time.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, _LAST_BACKOFF_S)


def files_in(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield name in the upload and local path of a file, or of all files in a directory except hidden ones.

    Raises:
        UserError: ``path`` does not exist, cannot be read, or has a link to a file that does not exist.
    """
    if path.is_file():
        yield path.name, path
        return
    if not path.is_dir():
        raise UserError(f"{path} cannot be uploaded: no such file or directory")
    for top, directories, names in os.walk(path, followlinks=True, onerror=_raise):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            source = Path(top) / name
            if name.startswith("."):
                continue
            if not source.exists():
                raise UserError(f"{source} is a link to a file that is not there; complete the directory, or delete it")
            if source.is_file():
                yield source.relative_to(path).as_posix(), source


def _raise(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _hash(path: Path) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(api: ApiConnection, where: str, file: SetFile, target: Path, tell: Callable[[int], object]) -> None:
    """Download one file to ``target``, unless it is there already. Waits while another download writes this file."""
    if target.is_file() and target.stat().st_size == file.size and _hash(target) == file.sha256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beginning = target.name.encode()[:_MAX_PART_NAME_BYTES].decode(errors="ignore")
    part = target.with_name(f".{beginning}.{file.sha256[:12]}.part")
    patience = _Patience()
    with part.open("ab") as opened:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        if not _is_at(part, opened):  # the other download has ended
            _fetch(api, where, file, target, tell)
            return
        opened.seek(0, os.SEEK_END)

        def take(data: bytes) -> None:
            nonlocal patience
            opened.write(data)
            tell(opened.tell())
            patience = _Patience()

        while opened.tell() < file.size:
            try:
                api.stream_bytes(f"{where}/file", params={"path": file.path}, first=opened.tell(), take=take)
            except HeadraceApiError as error:
                if error.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    break  # it is shorter now
                patience.wait_or_raise(error)
        opened.flush()
        if _hash(part) != file.sha256:
            part.unlink()
            raise HeadraceApiError(f"{file.path} of the model has changed while it was downloaded; download it again")
        part.replace(target)


def _is_at(path: Path, opened: BufferedWriter) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened.fileno()))
    except FileNotFoundError:
        return False


def _tell(on_progress: OnProgress | None, done: int, *, total: int, before: int = 0) -> None:
    if on_progress is not None:
        on_progress(before + done, total)


def _has_changed(source: Path) -> UserError:
    return UserError(f"{source} has changed while it was uploaded; upload it again once it is complete")


def _about(path: Path, done: str, error: HeadraceApiError) -> HeadraceApiError:
    return type(error)(f"{path} cannot be {done}: {error}", status=error.status, problem=error.problem)
