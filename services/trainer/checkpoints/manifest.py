"""Lists a directory's files with sizes and SHA-256, so that damage is found before the files are loaded.

    rank 0 --its files--> part-00000.json -+
    rank 1 --its files--> part-00001.json -+--> rank 0 --the parts, other files--> manifest.json

Every writer reads its own files back once for their checksums, while they are still in its machine's page cache.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.files.disk_sync import sync
from shared.files.file_roots import open_regular
from shared.message_invariants import Count

MANIFEST_FILE = "manifest.json"
_PART = "part-"


class FileRecord(msgspec.Struct, frozen=True):
    """Size and checksum of a file when it was written."""

    size_bytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """All files of a directory except the manifest, by path relative to the directory."""

    files: dict[str, FileRecord]
    format_version: int = 1


def write_part(directory: Path, files: Sequence[Path], *, number: int) -> None:
    """Sync some of the directory's files to the disk, and list them for the rank that writes the manifest.

    Raises:
        OSError: A file or the list could not be written.
    """
    _write(part_file(directory, number), _records(directory, files))


def part_file(directory: Path, number: int) -> Path:
    """Return the path of the file list that rank ``number`` wrote. It exists until the manifest is written."""
    return directory / f"{_PART}{number:05d}.json"


def write_manifest(directory: Path) -> None:
    """Sync all files of the directory to the disk, then write their manifest and sync it too.

    Files that `write_part` listed are not read again.

    Raises:
        OSError: A file or the manifest could not be written, or a list of `write_part` could not be read.
    """
    records: dict[str, FileRecord] = {}
    for part in sorted(directory.glob(f"{_PART}*.json")):
        try:
            records |= msgspec.json.decode(part.read_bytes(), type=Manifest).files
        except msgspec.DecodeError as error:
            raise OSError(f"{part} cannot be read: {error}") from error
        part.unlink()
    rest = [path for path in directory.rglob("*") if path.is_file() and _name(directory, path) not in records]
    records |= _records(directory, rest)
    _write(directory / MANIFEST_FILE, dict(sorted(records.items())))
    for folder in {directory, *(path for path in directory.rglob("*") if path.is_dir())}:
        sync(folder)


def find_damage(directory: Path) -> str | None:
    """Return a sentence that names the first damaged file, or None if all files are intact."""
    manifest_file = directory / MANIFEST_FILE
    try:
        manifest = _read(manifest_file)
    except FileNotFoundError:
        return f"{manifest_file} is missing: writing was never finished"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{manifest_file} cannot be read: {error}"
    if not manifest.files:
        return f"{manifest_file} lists no files"
    for name, record in manifest.files.items():
        if not _is_inside(name):
            return f"{manifest_file} lists {name[:200]!r}, which is not in the directory"
        path = directory / name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != record.size_bytes:
                return f"{path} has {size_bytes} bytes instead of {record.size_bytes}"
            with open_regular(path) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    return f"{path} has changed since it was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None


def has_all_files(directory: Path) -> bool:
    """Whether all files in the manifest exist with their sizes. Faster than `find_damage`, but misses flipped bits."""
    try:
        manifest = _read(directory / MANIFEST_FILE)
        return all(
            _is_inside(name) and (directory / name).stat().st_size == record.size_bytes
            for name, record in manifest.files.items()
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def sync_tree(directory: Path) -> None:
    """Sync a directory, its folders and all of their files to the disk."""
    sync(*directory.rglob("*"), directory)


def _read(file: Path) -> Manifest:
    with open_regular(file) as opened:
        return msgspec.json.decode(opened.read(), type=Manifest)


def _is_inside(name: str) -> bool:
    """Whether a path in a manifest stays in its directory. A forged manifest could name any file of the machine."""
    return not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _records(directory: Path, files: Sequence[Path]) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    for path in sorted(files):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        records[_name(directory, path)] = FileRecord(size_bytes=path.stat().st_size, sha256=sha256)
    return records


def _write(file: Path, records: dict[str, FileRecord]) -> None:
    with file.open("wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(Manifest(files=records)), indent=2))
        stream.flush()
        os.fsync(stream.fileno())


def _name(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()
