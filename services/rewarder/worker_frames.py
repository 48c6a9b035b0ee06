"""What the service and a reward worker say to each other over their socket: msgpack, never pickle.

    service                                  worker
       <------------------------------ Ready         limits are set, waiting
       Task ------------------------->               import the function's module (import deadline)
       <------------------------------ Started       the function's own deadline begins here
       <------------------------------ Answer
    or, in a worker made for it:
       Inspect ---------------------->
       <------------------------------ Inspected, or Refused with a sentence

A frame is four bytes of length, big-endian, and that many bytes of msgpack.
"""

import socket
import struct
from typing import Any, Literal, TypeVar

import msgspec

from services.rewarder.module_sources import Sources
from services.rewarder.reward_call import Verdict
from shared.message_invariants import Seconds

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 128 * 1024 * 1024
_FrameT = TypeVar("_FrameT")
Kind = Literal["built-in", "sync", "async", "endpoint", "reward-model"]


class Task(msgspec.Struct, frozen=True, tag=True):
    """Call ``function`` with ``call``, an encoded RewardCall.

    ``timeout_s`` bounds its processor time, ``import_timeout_s`` that of importing its module.
    ``version`` is the key of the version of its module, as the file is if empty; ``sources`` is that version, unless
    this worker was given it before.
    """

    function: str
    call: msgspec.Raw
    timeout_s: Seconds
    import_timeout_s: Seconds
    version: str = ""
    sources: Sources | None = None


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Say what ``function`` is, and whether it can be given these keyword arguments.

    It is looked at in this version of its module, or as its files are now.
    """

    function: str
    kwargs: dict[str, Any] = {}
    sources: Sources | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Waiting for work."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The function is loaded and about to be called."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """One verdict a completion; ``trace`` is for the log if the function raised, ``version`` of what answered."""

    verdicts: list[Verdict]
    trace: str = ""
    version: str = ""


class Inspected(msgspec.Struct, frozen=True, tag=True):
    """What a function is; of each inner list in ``required_columns`` the dataset needs one column.

    ``sources`` is the version of a Python function's module.
    """

    kind: Kind
    summary: str = ""
    required_columns: list[list[str]] = []
    sources: Sources | None = None
    version: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no such function; ``detail`` says what to do."""

    detail: str


Request = Task | Inspect
Reply = Ready | Started | Answer | Inspected | Refused

encode_frame_body = msgspec.msgpack.Encoder().encode
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request:
    """Return the request in a frame; raises msgspec.DecodeError if there is none."""
    return decode_frame(_request_decoder, data)


def decode_reply(data: bytes) -> Reply:
    """Return the reply in a frame; raises msgspec.DecodeError if there is none."""
    return decode_frame(_reply_decoder, data)


def decode_frame(decoder: "msgspec.msgpack.Decoder[_FrameT]", data: bytes) -> _FrameT:
    """Return what is in a frame.

    Raises:
        msgspec.DecodeError: It cannot be read, for whatever reason: text that is no UTF-8 and nesting without an end
            have errors of their own, and user code can reach the socket.
    """
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def send_frame(channel: socket.socket, body: bytes) -> None:
    """Send one frame, blocking."""
    channel.sendall(HEADER.pack(len(body)) + body)


def receive_frame(channel: socket.socket) -> bytes | None:
    """Return the next frame, blocking; None when the other side is gone."""
    header = _receive_exactly(channel, HEADER.size)
    return None if header is None else _receive_exactly(channel, int(HEADER.unpack(header)[0]))


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        part = channel.recv(min(1 << 20, num_bytes - len(received)))
        if not part:
            return None
        received += part
    return bytes(received)
