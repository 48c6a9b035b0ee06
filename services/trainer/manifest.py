"""A list of a directory's files with sizes and SHA-256, by which damage is found before it is loaded."""

import hashlib
import os
from pathlib import Path

import msgspec

MANIFEST_FILE = "manifest.json"


class FileRecord(msgspec.Struct, frozen=True):
    """What a file was when it was written."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Every file of a directory but the manifest, by path relative to it."""

    files: dict[str, FileRecord]
    format_version: int = 1


def write_manifest(directory: Path) -> None:
    """Bring every file of the directory to the disk, then list them in its manifest, and bring that to the disk too."""
    records: dict[str, FileRecord] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            records[path.relative_to(directory).as_posix()] = FileRecord(
                size_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
            )
    with (directory / MANIFEST_FILE).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(Manifest(files=records)), indent=2))
        file.flush()
        os.fsync(file.fileno())
    for folder in {directory, *(path for path in directory.rglob("*") if path.is_dir())}:
        sync_directory(folder)


def find_damage(directory: Path) -> str | None:
    """Return a sentence that names the first damaged file, or None if all are as they were written."""
    manifest_file = directory / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(manifest_file.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return f"{manifest_file} is missing: it was never finished"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{manifest_file} cannot be read: {error}"
    if not manifest.files:
        return f"{manifest_file} lists no file"
    for name, record in manifest.files.items():
        path = directory / name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != record.size_bytes:
                return f"{path} has {size_bytes} bytes instead of {record.size_bytes}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    return f"{path} is not what was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to the disk, without which a new file may vanish in a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
