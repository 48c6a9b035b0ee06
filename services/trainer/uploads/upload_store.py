"""Stores sets of files that clients upload, such as a data set or a model. Methods block: call them in a thread.

    begin: the set's files ---> .incoming/ID/manifest.json
    write: pieces, in order --> .incoming/ID/HASH.part --hash right--> .incoming/ID/HASH, .files/HASH for later sets
    finish, with the last file --> ID/, the directory that runs name

A directory ID/ is complete and never changes. A file that an earlier set has is linked and not sent again. Files that
have arrived in part stay for the next try. Names come from file_set.py's checks, so they stay below their directory.

The time of the last use of a set is the modification time of its directory.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from services.trainer.problems import Problem
from services.trainer.uploads.upload_disk import UploadDisk
from services.trainer.uploads.upload_part import Part, too_long
from shared.access.route_table import MAX_UPLOADED_PIECE
from shared.files.disk_sync import sync, write_whole
from shared.files.file_set import SetFile, directories_of, set_id, why_no_set

_INCOMING, _FILES = ".incoming", ".files"
_MANIFEST, _WHOLE, _SET = "manifest.json", "whole", "sha256-"
_DIRECTORY_BYTES = 4096
_EMPTY = hashlib.sha256().hexdigest()
_WITHOUT_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES})


@dataclass(frozen=True)
class FileState:
    """One file of a set, and how much of it is here.

    Args:
        path: Path in the set.
        size: Size in bytes.
        sha256: Hash of the content.
        received: Bytes that are here; a client sends the rest.
        is_whole: Whether the whole file is here, with the right hash.
    """

    path: str
    size: int
    sha256: str
    received: int
    is_whole: bool


@dataclass(frozen=True)
class SetState:
    """An uploaded set of files, and how much of it has arrived.

    Args:
        upload_id: The set's id.
        path: The directory that a run may name once the set is complete.
        is_complete: Whether all files are here.
        files: The files of the set, with how much of each is here.
    """

    upload_id: str
    path: str
    is_complete: bool
    files: list[FileState]


class UploadStore:
    """Stores uploaded sets of files in one directory: receives them in pieces, completes them, and deletes unused ones.

    Args:
        directory: The directory of all uploads.
        max_bytes: Largest sum of the sizes of a set's files.
        keep_free_bytes: Free space that uploads leave on the disk.
    """

    def __init__(self, directory: Path, *, max_bytes: int, keep_free_bytes: int) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self.disk = UploadDisk(directory, variable="HEADRACE_UPLOADS_DIR", keep_free_bytes=keep_free_bytes)
        self._changing = threading.Lock()
        """Held while sets come, are completed, are used, or expire."""
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def lock_of(self, upload_id: str, sha256: str) -> asyncio.Lock:
        """Return the lock that a request holds while it adds to a file. Called on the event loop."""
        found = self._locks.get((upload_id, sha256))
        if found is None:
            found = self._locks[upload_id, sha256] = asyncio.Lock()
        return found

    def begin(self, files: list[SetFile]) -> SetState:
        """Begin or continue an upload; return how much of it is here. This is a use, which delays the upload's expiry.

        Raises:
            Problem: 422 for files that cannot form a directory, 413 for too many bytes, 507 without space for them.
        """
        if why := why_no_set(files):
            raise Problem(422, "Invalid upload", f"These files are not a directory: {why}.")
        if any(file.size == 0 and file.sha256 != _EMPTY for file in files):
            raise Problem(422, "Invalid upload", "A file of 0 bytes has another hash than nothing has.")
        total = sum({file.sha256: file.size for file in files}.values())
        if total > self._max_bytes:
            raise Problem(
                413,
                "Upload too large",
                f"The files have {total} bytes, and an upload may have {self._max_bytes}. The operator raises "
                "HEADRACE_MAX_UPLOAD_BYTES of the trainer for more.",
            )
        upload_id = set_id(files)
        with self._changing, self.disk.or_507():
            if self._use(upload_id):
                return self._state(upload_id, files, is_complete=True)
            incoming = self._incoming(upload_id)
            is_new = not (incoming / _MANIFEST).exists()
            incoming.mkdir(parents=True, exist_ok=True)
            for file in files:
                self._link_known(incoming, file)
            missing = total - sum({file.sha256: self._received(incoming, file) for file in files}.values())
            manifest = msgspec.json.encode([asdict(file) for file in files])
            num_directories = len(directories_of(file.path for file in files))
            num_missing = len({file.sha256 for file in files if not (incoming / file.sha256).exists()})
            try:
                self.disk.require(
                    missing + len(manifest) + _DIRECTORY_BYTES * num_directories,
                    num_files=num_missing + num_directories + 2,
                )
            except Problem:
                if is_new:
                    shutil.rmtree(incoming, ignore_errors=True)
                raise
            write_whole(incoming / _MANIFEST, manifest)
            return self._finished_or_not(upload_id, files)

    def state(self, upload_id: str) -> SetState:
        """Return how much of an upload is here.

        Raises:
            Problem: 404 if it was never begun, is complete, or has expired.
        """
        return self._state(upload_id, self._manifest(upload_id))

    def open_part(self, upload_id: str, sha256: str, *, offset: int, size: int) -> Part:
        """Open a partly received file, to append ``size`` bytes at ``offset``; ``size`` is -1 if it is not known.

        Raises:
            Problem: 404 for an unknown upload or file, 409 if ``offset`` is not the number of bytes here,
                422 if the file would get longer than announced, 507 without space.
        """
        file = next((file for file in self._manifest(upload_id) if file.sha256 == sha256), None)
        if file is None:
            raise Problem(404, "No such file", "This upload has no file with this hash. POST /v1/uploads names them.")
        incoming = self._incoming(upload_id)
        received = self._received(incoming, file)
        if offset != received or (incoming / sha256).exists():
            raise Problem(
                409,
                "Wrong offset",
                f"{received} bytes of this file of {file.size} bytes are here; send what follows, not what begins at "
                f"{offset}.",
                received=received,
            )
        if offset + size > file.size:
            raise too_long(file)
        with self._under_way():
            release = self.disk.promise(min(size if size >= 0 else file.size - offset, MAX_UPLOADED_PIECE))
            try:
                os.utime(incoming / _MANIFEST)
                return Part(incoming / f"{sha256}.part", file, offset, on_close=release)
            except OSError:
                release()
                raise

    def check_part(self, part: Part) -> None:
        """Check the hash of a file whose last bytes have arrived. This takes long if the file is large.

        Raises:
            Problem: 422 if the file has another hash than announced, and its bytes are deleted; 404 if another request
                has completed the set, or it has expired; 507 without space.
        """
        file = part.file
        with self._under_way(), part.path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
            os.fsync(opened.fileno())
        if found != file.sha256:
            part.path.unlink(missing_ok=True)
            raise Problem(
                422,
                "Wrong hash",
                f"The bytes that came have the hash {found}, and not {file.sha256} as announced. They are deleted: "
                "send the file again from its beginning, or begin another upload if it has changed.",
            )

    def close_part(self, upload_id: str, part: Part) -> SetState:
        """End a piece of a file; return the upload's state. Keep a whole file, whose hash the caller has checked.

        The last whole file completes the set: its directory appears under the path that runs name.

        Raises:
            Problem: 404 if another request has completed the set, or it has expired; 507 without space.
        """
        file = part.file
        if part.received < file.size:
            return self.state(upload_id)
        with self._changing, self._under_way():
            incoming = self._incoming(upload_id)
            part.path.replace(incoming / file.sha256)
            (self.directory / _FILES).mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                _link(incoming / file.sha256, self.directory / _FILES / file.sha256)
            return self._finished_or_not(upload_id, self._manifest(upload_id))

    def use(self, *texts: str) -> None:
        """Note a use of every set whose id occurs in the texts, such as paths or URLs in a run's settings."""
        with self._changing:
            for upload_id in _named_in(texts):
                self._use(upload_id)

    def expire(self, in_use: Collection[str], *, after_s: float) -> int:
        """Delete the sets and unfinished uploads that were not used for ``after_s`` seconds, and return their number.

        Args:
            in_use: Texts from the settings of runs that have not ended: their sets count as used now.
            after_s: Seconds without a use.
        """
        self.use(*in_use)
        oldest, used, num_deleted = time.time() - after_s, _named_in(in_use), 0
        incoming = self.directory / _INCOMING
        with self._changing:
            for path in _entries(self.directory):
                if path.name.startswith(_SET) and path.name not in used and path.stat().st_mtime < oldest:
                    # It loses its name first: one that was deleted only in part would still count as complete.
                    incoming.mkdir(exist_ok=True)
                    shutil.rmtree(path.rename(incoming / f"{path.name}.{time.time_ns()}"), ignore_errors=True)
                    num_deleted += 1
            for path in _entries(incoming):
                num_deleted += _delete_if_older(path, oldest)
            for path in _entries(self.directory / _FILES):
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_nlink == 1:  # no set has it any more
                        path.unlink()
        return num_deleted

    def _use(self, upload_id: str) -> bool:
        """Note a use of a complete set, as its directory's modification time; return False if it does not exist."""
        path = self.directory / upload_id
        with contextlib.suppress(FileNotFoundError, PermissionError):  # it is not here, or belongs to somebody else
            os.utime(path)
        return path.is_dir()

    def _incoming(self, upload_id: str) -> Path:
        return self.directory / _INCOMING / upload_id

    def _manifest(self, upload_id: str) -> list[SetFile]:
        with self._under_way():
            data = (self._incoming(upload_id) / _MANIFEST).read_bytes()
        return msgspec.json.decode(data, type=list[SetFile])

    @contextlib.contextmanager
    def _under_way(self) -> Generator[None]:
        """Turn a missing file into a Problem 404 (no such upload), and other disk errors into a Problem 507 or 503."""
        with self.disk.or_507():
            try:
                yield
            except FileNotFoundError as error:
                raise Problem(
                    404,
                    "No such upload",
                    "No upload with this id is under way: it is complete, was never begun, or has expired. POST "
                    "/v1/uploads begins it, or says where its files are.",
                ) from error

    def _link_known(self, incoming: Path, file: SetFile) -> None:
        whole, known = incoming / file.sha256, self.directory / _FILES / file.sha256
        if whole.exists():
            return
        if file.size == 0:
            whole.touch()
        elif known.is_file() and known.stat().st_size == file.size:
            _link(known, whole)  # a copy that broke off would count as whole

    def _received(self, incoming: Path, file: SetFile) -> int:
        if (incoming / file.sha256).exists():
            return file.size
        try:
            return min(file.size, (incoming / f"{file.sha256}.part").stat().st_size)
        except FileNotFoundError:
            return 0

    def _state(self, upload_id: str, files: list[SetFile], *, is_complete: bool = False) -> SetState:
        incoming, states = self._incoming(upload_id), list[FileState]()
        for file in files:
            is_whole = is_complete or (incoming / file.sha256).exists()
            received = file.size if is_whole else self._received(incoming, file)
            states.append(FileState(**asdict(file), received=received, is_whole=is_whole))
        return SetState(upload_id, str(self.directory / upload_id), is_complete=is_complete, files=states)

    def _finished_or_not(self, upload_id: str, files: list[SetFile]) -> SetState:
        """If all files have arrived, move the set to its final directory. Return its state."""
        state = self._state(upload_id, files)
        if not all(file.is_whole for file in state.files):
            return state
        incoming = self._incoming(upload_id)
        whole = incoming / _WHOLE
        num_directories = len(directories_of(file.path for file in files))
        self.disk.require(_DIRECTORY_BYTES * num_directories, num_files=num_directories + 1)
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        try:
            for file in files:
                self._place(incoming / file.sha256, whole / file.path, num_bytes=file.size)
        except (OSError, Problem):
            shutil.rmtree(whole, ignore_errors=True)
            raise
        sync(*(path for path in (whole, *whole.rglob("*")) if path.is_dir()))
        whole.rename(self.directory / upload_id)
        sync(self.directory)
        shutil.rmtree(incoming, ignore_errors=True)
        return self._state(upload_id, files, is_complete=True)

    def _place(self, source: Path, target: Path, *, num_bytes: int) -> None:
        """Link a file, or copy it on a file system without links."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if _link(source, target):
            return
        release = self.disk.promise(num_bytes)
        try:
            shutil.copyfile(source, target)
            sync(target)
        finally:
            release()


def _link(source: Path, target: Path) -> bool:
    """Link a file; return False on a file system without links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        return False
    return True


def _named_in(texts: Collection[str]) -> set[str]:
    return {name for text in texts for name in re.findall(r"sha256-[0-9a-f]{64}", text)}


def _entries(directory: Path) -> list[Path]:
    try:
        return [*directory.iterdir()]
    except FileNotFoundError:
        return []


def _delete_if_older(path: Path, oldest: float) -> bool:
    """Delete an unfinished upload if its last use was before ``oldest`` (Unix seconds). Return whether it did so."""
    try:
        last = (path / _MANIFEST).stat().st_mtime
    except FileNotFoundError:
        last = path.stat().st_mtime
    if last >= oldest:
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True
