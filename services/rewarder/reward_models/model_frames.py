"""The messages between the service and the process of a reward model, over a socket: msgpack, never pickle.

    service                                  model process
       Load ------------------------->
       <------------------------------ Described     the model's config is accepted
       <------------------------------ Loaded, or LoadFailed with the reason, and the process ends
       Score, Score, Cancel --------->               any number at any time, also before it is loaded
       <------------------------------ Working       works on these calls from now on
       <------------------------------ Passed        one forward pass is done
       <------------------------------ Scored        one call is answered

A frame has the same form as in worker_frames.py: four bytes of length, big-endian, then msgpack of this length.
"""

from typing import Any

import msgspec

from services.rewarder.reward_call import Verdict
from shared.message_invariants import Count, Seconds
from shared.messages import Completion, Prompt
from shared.user_code.worker_frames import decode_frame


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load a model. ``source`` is a directory or an id on the hub. ``device`` and ``dtype`` may be ``auto``."""

    source: str
    revision: str | None
    device: str
    dtype: str
    max_batch_tokens: Count


class Score(msgspec.Struct, frozen=True, tag=True):
    """Score each prompt with its completion. ``lane`` is the run's id or the HTTP lane. Lanes take turns."""

    id: Count
    lane: str
    prompts: list[Prompt]
    completions: list[Completion]
    chat_template_kwargs: dict[str, Any] = {}


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Drop the call with this id, because its caller no longer waits for the answer."""

    id: Count


class Described(msgspec.Struct, frozen=True, tag=True):
    """The config is accepted, and the weights are loaded next. ``revision`` is the commit of a model on the hub."""

    architecture: str
    revision: str | None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is ready. ``version`` is the first digits of the commit, or of the directory's content hash."""

    architecture: str
    version: str
    device: str
    dtype: str


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded. ``detail`` says why, and what to do."""

    detail: str


class Working(msgspec.Struct, frozen=True, tag=True):
    """The model's process works on the calls ``ids`` from now on, or is idle if ``ids`` is empty.

    With ``is_scoring``, the deadlines of the calls start. Without it, the texts of the calls are tokenized.
    """

    ids: list[Count]
    is_scoring: bool


class Passed(msgspec.Struct, frozen=True, tag=True):
    """Reports one forward pass: its number of texts, its tokens without and with padding, and its time."""

    num_texts: Count
    num_tokens: Count
    num_padded_tokens: Count
    seconds: Seconds


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The answer to one call: one verdict per completion."""

    id: Count
    verdicts: list[Verdict]


Request = Load | Score | Cancel
Reply = Described | Loaded | LoadFailed | Working | Passed | Scored

_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request:
    """Return the request in a frame; raises msgspec.DecodeError if it is not valid."""
    return decode_frame(_request_decoder, data)


def decode_reply(data: bytes) -> Reply:
    """Return the reply in a frame; raises msgspec.DecodeError if it is not valid."""
    return decode_frame(_reply_decoder, data)
