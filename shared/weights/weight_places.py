"""The places of pushed weights, for transports that move no bytes between two processes. Bodies of control.py.

    disk   a version's directory below the run's, which both ends can reach
    ipc    a buffer in the memory of a GPU that both processes use

Every value is checked before it is used: a name contains no path, and a handle is bytes and numbers.
"""

import base64
import binascii
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_BYTES: Final = 2**53
"""No machine has more, and every reader of JSON represents the number exactly."""
_MAX_HANDLE_CHARS: Final = 1024


def _is_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    return text


Base64 = Annotated[str, Field(max_length=_MAX_HANDLE_CHARS), AfterValidator(_is_base64)]
VERSION_NAME: Final = r"[0-9]{8}-[0-9]{8}-v[0-9]{1,12}"
"""Directory name of one version: incarnation of the trainer, number within it, policy version."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DiskPlace(_Body):
    """One version below the run's directory. The join body names that directory."""

    name: str = Field(pattern=f"^{VERSION_NAME}$")
    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$", description="sha256 of its manifest, which identifies it")


class IpcBuffer(_Body):
    """CUDA memory that another process has exported: the values that torch's ``_share_cuda_`` returns.

    Handles are opaque bytes of the driver. None of this is ever unpickled.
    """

    device_uuid: str = Field(pattern="^[0-9a-fA-F-]{32,36}$")
    num_bytes: int = Field(ge=1, le=MAX_BYTES, description="Size of the buffer")
    handle: Base64
    storage_bytes: int = Field(ge=1, le=MAX_BYTES)
    storage_offset_bytes: int = Field(ge=0, le=MAX_BYTES, description="Where it begins in the driver's allocation")
    ref_counter_handle: Base64
    ref_counter_offset: int = Field(ge=0, le=MAX_BYTES)
    event_handle: Base64
    event_sync_required: bool
