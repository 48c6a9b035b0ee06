"""What the service and the process of a reward model say to each other over their socket: msgpack, never pickle.

    service                                  model process
       Load ------------------------->
       <------------------------------ Described     its config was read and will do
       <------------------------------ Loaded, or LoadFailed with a sentence, and the process ends
       Score, Score, Cancel --------->               any number at any time, also before it is loaded
       <------------------------------ Working       on these calls from now on
       <------------------------------ Passed        one forward pass is done
       <------------------------------ Scored        one call is answered

Frames are those of worker_frames.py: four bytes of length, big-endian, and that many bytes of msgpack.
"""

from typing import Any

import msgspec

from services.rewarder.reward_call import Completion, Verdict
from shared.messages import Prompt


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load a model: ``source`` is a directory or an id on the hub; ``device`` and ``dtype`` may be ``auto``."""

    source: str
    revision: str | None
    device: str
    dtype: str
    max_batch_tokens: int


class Score(msgspec.Struct, frozen=True, tag=True):
    """Score each prompt with its completion; ``lane`` is who takes turns with others."""

    id: int
    lane: str
    prompts: list[Prompt]
    completions: list[Completion]
    chat_template_kwargs: dict[str, Any] = {}


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this call any more."""

    id: int


class Described(msgspec.Struct, frozen=True, tag=True):
    """The model's config will do; its weights are loaded next. ``revision`` is the commit, of a model on the hub."""

    architecture: str
    revision: str | None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Ready. ``version`` is the first digits of the commit, or of the sha256 of the directory's files."""

    architecture: str
    version: str
    device: str
    dtype: str


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """It cannot be loaded; ``detail`` says why, and what to do."""

    detail: str


class Working(msgspec.Struct, frozen=True, tag=True):
    """From now on at work for these calls, for none if empty; with ``is_scoring`` their deadlines run."""

    ids: list[int]
    is_scoring: bool


class Passed(msgspec.Struct, frozen=True, tag=True):
    """One forward pass: its texts, their tokens, the tokens with padding, and its time."""

    num_texts: int
    num_tokens: int
    num_padded_tokens: int
    seconds: float


class Scored(msgspec.Struct, frozen=True, tag=True):
    """One verdict a completion."""

    id: int
    verdicts: list[Verdict]


Request = Load | Score | Cancel
Reply = Described | Loaded | LoadFailed | Working | Passed | Scored

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
