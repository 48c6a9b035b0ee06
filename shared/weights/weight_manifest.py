"""Reads and writes the files of one policy version on disk. The manifest comes last: without it, there is no version.

    <weight_dir>/<run id>/00000003-00000017-v42/      incarnation of the trainer, number within it, policy version
        weights-00001-of-00002.safetensors            parameters (full), or their deltas as uint8 tensors (delta)
        weights-00002-of-00002.safetensors
        manifest.json                                 size and digest of each file, checksum of the resulting whole set

A delta names the directory it starts from. Following these names from any version leads to a full one.
"""

import hashlib
from collections.abc import Callable
from typing import Final, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from shared.control import MAX_BYTES, VERSION_NAME, ControlBody, DiskPlace
from shared.errors import PushError
from shared.message_invariants import MAX_POLICY_VERSION
from shared.weights.weight_checksum import digest
from shared.weights.weight_store import WeightStore

MANIFEST: Final = "manifest.json"
RANGE_BYTES: Final = 16 << 20
"""Bytes of a file to read at a time. They take a fraction of a second over any network that weights are sent over."""


class WeightFile(ControlBody):
    """One safetensors file of a policy version, as the manifest lists it."""

    name: str = Field(pattern=r"^weights-[0-9]{5}-of-[0-9]{5}\.safetensors$")
    num_bytes: int = Field(ge=0, le=MAX_BYTES)
    digest: str = Field(pattern="^[0-9a-f]{32}$", description="Digest of its bytes (shared/weights/weight_checksum.py)")


class Manifest(ControlBody):
    """The content of a policy version's manifest.json: its files, its checksum and, if it is a delta, its base."""

    format_version: Literal[1] = 1
    run_id: str
    policy_version: int = Field(ge=0, le=MAX_POLICY_VERSION)
    encoding: Literal["full", "delta"]
    base: str | None = Field(default=None, pattern=f"^{VERSION_NAME}$", description="Directory a delta starts from")
    base_checksum: str | None = Field(default=None, description="Checksum of the set a delta starts from")
    checksum: str = Field(description="Checksum of the whole set, once this is applied")
    files: list[WeightFile]

    @model_validator(mode="after")
    def _a_delta_has_a_base(self) -> Self:
        if (self.encoding == "delta") != (self.base is not None and self.base_checksum is not None):
            raise ValueError("a delta must name its base, and a full set must not")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")
        return self


def file_name(index: int, count: int) -> str:
    """Return the name of the weight file with this index (from 0), if a policy version has ``count`` files."""
    return f"weights-{index + 1:05d}-of-{count:05d}.safetensors"


def describe_file(name: str, data: bytes) -> WeightFile:
    """Return the manifest's entry for a file: its name, size and digest."""
    return WeightFile(name=name, num_bytes=len(data), digest=_digest(data))


def write_manifest(store: WeightStore, directory: str, manifest: Manifest) -> DiskPlace:
    """Write the manifest, which publishes the policy version, and return the place to send to generators.

    Raises:
        PushError: The manifest could not be written.
    """
    data = manifest.model_dump_json(indent=1).encode()
    store.write(f"{directory}/{MANIFEST}", data)
    return DiskPlace(name=directory, manifest_sha256=hashlib.sha256(data).hexdigest())


def read_manifest(store: WeightStore, directory: str, *, sha256: str | None = None) -> Manifest:
    """Read the manifest of a policy version.

    Raises:
        PushError: The manifest is missing or damaged, or its hash is not the given ``sha256``.
    """
    data = store.read(f"{directory}/{MANIFEST}")
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise PushError(f"{directory}/{MANIFEST} is not the file that the trainer wrote")
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise PushError(f"{directory}/{MANIFEST} is damaged: it has {error.error_count()} errors") from error


def read_file(store: WeightStore, directory: str, file: WeightFile, *, check: Callable[[], None]) -> bytes:
    """Return the bytes of a weight file, after comparing their size and digest with the manifest.

    ``check`` is called before each range is read. An exception that it raises ends the reading.

    Raises:
        PushError: The file is missing or damaged.
    """
    path = f"{directory}/{file.name}"
    ranges: list[bytes] = []
    for start in range(0, file.num_bytes, RANGE_BYTES):
        check()
        is_last = file.num_bytes - start <= RANGE_BYTES
        # One byte too many shows a file that is too long. Stores refuse a range that begins at the end of a file.
        end = file.num_bytes + 1 if is_last else start + RANGE_BYTES
        ranges.append(store.read(path, start, end))
        if len(ranges[-1]) < min(RANGE_BYTES, file.num_bytes - start):
            break
    data = b"".join(ranges)
    if len(data) != file.num_bytes:
        raise PushError(f"{directory}/{file.name} has {len(data)} bytes and should have {file.num_bytes}")
    if _digest(data) != file.digest:
        raise PushError(f"{directory}/{file.name} is damaged: its checksum differs from the manifest's")
    return data


def _digest(data: bytes) -> str:
    return digest(np.frombuffer(data, np.uint8)).hex()
