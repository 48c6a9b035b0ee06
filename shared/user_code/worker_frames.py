"""The messages between the service and a worker, over a socket: msgpack, never pickle.

    service                                  worker
       <------------------------------ Ready         limits are set, waiting
       Task ------------------------->               import the function's module (import deadline)
       <------------------------------ Started       the function's own deadline begins here
       <------------------------------ an answer
         or, instead of both:          Refused       the function cannot be loaded
    or, in a separate worker:
       Inspect ---------------------->
       <------------------------------ a description, or Refused with the reason

The kind of task (task_kind.py) defines its answers and descriptions.

A frame is four bytes of length, big-endian, then msgpack of this length.
"""

import socket
import struct
from typing import Any, TypeVar

import msgspec

from shared.message_invariants import Seconds
from shared.user_code.module_sources import Sources

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 128 * 1024 * 1024
_FrameT = TypeVar("_FrameT")


class Task(msgspec.Struct, frozen=True, tag=True):
    """Asks a worker to call ``function`` with ``call``, the arguments as the kind of task encodes them.

    ``timeout_s`` limits the worker's processor time for the call, and ``import_timeout_s`` for importing its module.
    ``version`` is the key of the module's version; if empty, the current file is used. ``sources`` is this version, or
    None if this worker has received it before.
    """

    function: str
    call: msgspec.Raw
    timeout_s: Seconds
    import_timeout_s: Seconds
    version: str = ""
    sources: Sources | None = None


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks a worker to describe ``function``, and to check that it takes these keyword arguments.

    ``sources`` is the version of the function's module; if None, the current files are used.
    """

    function: str
    kwargs: dict[str, Any] = {}
    sources: Sources | None = None


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of answers to a task, with whether memory ran out. Each kind of task adds its own fields."""

    is_out_of_memory: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reports that a new worker has set itself up and waits for work."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Reports that the function is loaded, so its own deadline begins."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reports that a function cannot be used. ``detail`` has the reason, and what to do."""

    detail: str
    is_out_of_memory: bool = False


Request = Task | Inspect
Reply = Ready | Started | Refused
"""The replies of every kind of task."""

encode_frame_body = msgspec.msgpack.Encoder().encode
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def decode_request(data: bytes) -> Request:
    """Decode a service's request from the bytes of a frame. Raises msgspec.DecodeError if they are not valid."""
    return decode_frame(_request_decoder, data)


def decode_frame(decoder: "msgspec.msgpack.Decoder[_FrameT]", data: bytes) -> _FrameT:
    """Decode the bytes of a frame with ``decoder``.

    Raises:
        msgspec.DecodeError: The frame is not valid. This includes text that is not UTF-8 and endless nesting, which
            msgspec reports with other errors. User code can reach the socket and send such frames.
    """
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def send_frame(channel: socket.socket, body: bytes) -> None:
    """Send one frame. Blocks."""
    channel.sendall(HEADER.pack(len(body)) + body)


def receive_frame(channel: socket.socket) -> bytes | None:
    """Return the next frame, or None when the other side is gone. Blocks."""
    header = _receive_exactly(channel, HEADER.size)
    return None if header is None else _receive_exactly(channel, int(HEADER.unpack(header)[0]))


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        try:
            part = channel.recv(min(1 << 20, num_bytes - len(received)))
        except ConnectionResetError:  # it has left something unread
            return None
        if not part:
            return None
        received += part
    return bytes(received)
