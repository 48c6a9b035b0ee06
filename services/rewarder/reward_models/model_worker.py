"""The process of one reward model: ``python -m services.rewarder.reward_models.model_worker``, its socket on stdin.

    frames --> waiting calls, tokenised --> a round of calls --> passes, by length --> one answer per call

Between two passes it reads new calls and cancellations. The service kills this process when it hangs, and the process
ends by itself when the service is gone.
"""

import contextlib
import ctypes
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from services.rewarder.reward_call import Verdict, everyone
from services.rewarder.reward_models.batching import next_round, passes
from services.rewarder.reward_models.model_files import check_config, check_files, content_hash, fingerprint
from services.rewarder.reward_models.model_frames import (
    Cancel,
    Described,
    Load,
    Loaded,
    LoadFailed,
    Passed,
    Reply,
    Score,
    Scored,
    Working,
    decode_request,
)
from shared.errors import UserError
from shared.service.logs import configure_logging
from shared.user_code.error_text import describe, users_trace
from shared.user_code.module_sources import VERSION_CHARACTERS
from shared.user_code.worker_frames import receive_frame, send_frame

if TYPE_CHECKING:  # imports torch, which is not needed to refuse a model for its files
    from services.rewarder.reward_models.classifier import Classifier, Encoding

log = logging.getLogger("services.rewarder.reward_models.model_worker")

_PR_SET_PDEATHSIG = 1


class _Waiting:
    """A call that is not answered yet, with its tokens and the verdicts so far."""

    def __init__(self, request: Score, encodings: "list[Encoding | Verdict]") -> None:
        self.request = request
        self.encodings = encodings
        self.verdicts: list[Verdict | None] = [item if isinstance(item, Verdict) else None for item in encodings]

    def num_tokens(self) -> int:
        """Return the number of tokens of all texts of the call."""
        return sum(len(item["input_ids"]) for item in self.encodings if not isinstance(item, Verdict))


class _GoneError(Exception):
    """The model's process must end: the service has closed the socket, or the GPU may be unusable after an error."""


class ModelWorker:
    """Reads calls from the socket ``channel``, and scores them with ``model`` until the service is gone."""

    def __init__(self, channel: socket.socket, model: "Classifier", *, max_batch_tokens: int) -> None:
        self._channel = channel
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._calls: dict[int, _Waiting] = {}
        self._lanes: dict[str, deque[int]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)

    def run(self) -> NoReturn:
        """Score calls until the service is gone or the model fails on a GPU; both raise _GoneError."""
        while True:
            self._take_in(wait=not self._calls)
            num_tokens = {id_: call.num_tokens() for id_, call in self._calls.items()}
            ids = next_round(self._lanes, num_tokens, max_batch_tokens=self._max_batch_tokens)
            self._score_round(ids)
            if not self._calls:
                self._send(Working([], is_scoring=False))

    def _take_in(self, *, wait: bool) -> None:
        """Read all frames that have arrived. With ``wait``, block until a call to score has arrived."""
        while self._selector.select(None if wait else 0):
            frame = receive_frame(self._channel)
            if frame is None:
                raise _GoneError
            request = decode_request(frame)
            if isinstance(request, Cancel):
                self._forget(request.id)
            elif isinstance(request, Score):
                self._accept(request)
                wait = False

    def _accept(self, request: Score) -> None:
        self._send(Working([request.id], is_scoring=False))
        try:
            encodings = self._model.encode(request.prompts, request.completions, request.chat_template_kwargs)
        except Exception as error:  # noqa: BLE001  a tokenizer may raise anything; a bad text must not end the process
            self._send(Scored(request.id, everyone(len(request.completions), "error", _of_tokenizer(error))))
            return
        self._calls[request.id] = _Waiting(request, encodings)
        self._lanes.setdefault(request.lane, deque()).append(request.id)

    def _forget(self, id_: int) -> None:
        call = self._calls.pop(id_, None)
        queue = self._lanes.get(call.request.lane) if call is not None else None
        if call is not None and queue is not None and id_ in queue:
            queue.remove(id_)
            if not queue:
                del self._lanes[call.request.lane]

    def _score_round(self, ids: list[int]) -> None:
        texts: list[tuple[int, int, Encoding]] = []
        for id_ in ids:
            found = enumerate(self._calls[id_].encodings)
            texts += [(id_, index, item) for index, item in found if not isinstance(item, Verdict)]
            self._answer_if_done(id_)
        lengths = [len(encoding["input_ids"]) for _, _, encoding in texts]
        for chosen in passes(lengths, max_batch_tokens=self._max_batch_tokens):
            self._take_in(wait=False)
            together = [texts[index] for index in chosen if texts[index][0] in self._calls]
            if together:
                self._score_pass(together)

    def _score_pass(self, texts: "list[tuple[int, int, Encoding]]") -> None:
        ids = sorted({id_ for id_, _, _ in texts})
        self._send(Working(ids, is_scoring=True))
        lengths = [len(encoding["input_ids"]) for _, _, encoding in texts]
        started_at = time.monotonic()
        failure: Exception | None = None
        try:
            verdicts = self._model.score([encoding for _, _, encoding in texts])
        except Exception as error:  # noqa: BLE001  a model may raise anything; on a CPU the next pass can still work
            log.warning("the reward model failed: %s\n%s", describe(error), users_trace(error))
            failure = error
            verdicts = everyone(len(texts), "error", f"the model failed: {describe(error)}")
        seconds = time.monotonic() - started_at
        self._send(Passed(len(texts), sum(lengths), len(lengths) * max(lengths), seconds))
        for (id_, index, _), verdict in zip(texts, verdicts, strict=True):
            self._calls[id_].verdicts[index] = verdict
        for id_ in ids:
            self._answer_if_done(id_)
        if failure is not None and self._model.device != "cpu":
            raise _GoneError  # after an error the GPU may be unusable in this process; the service starts another one

    def _answer_if_done(self, id_: int) -> None:
        verdicts = [verdict for verdict in self._calls[id_].verdicts if verdict is not None]
        if len(verdicts) == len(self._calls[id_].verdicts):
            self._send(Scored(id_, verdicts))
            self._forget(id_)

    def _send(self, reply: Reply) -> None:
        _send(self._channel, reply)


def load(request: Load, channel: socket.socket) -> "tuple[Classifier, Loaded]":
    """Load the requested model, and return it with its Loaded reply. Sends Described when its config is accepted.

    Raises:
        UserError: The model cannot be loaded.
    """
    name = request.source
    if name.startswith("/"):
        directory, commit = Path(name), None
        _send(channel, Described(check_config(directory, name=name), None))
    else:
        from services.rewarder.reward_models.hub_download import fetch_all, fetch_config

        directory = fetch_config(name, request.revision)
        commit = directory.name
        _send(channel, Described(check_config(directory, name=name), commit))
        directory = fetch_all(name, commit)
    check_files(directory, name=name)
    from services.rewarder.reward_models.classifier import Classifier, be_quiet

    be_quiet()
    try:
        before = fingerprint(directory)
        version = content_hash(directory) if commit is None else commit
        model = Classifier(directory, name=name, device=request.device, dtype=request.dtype)
        is_same = fingerprint(directory) == before
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error}") from error
    if not is_same:
        raise UserError(f"the files of {name} were changed while it was loaded; try again when they are complete")
    return model, Loaded(model.architecture, version[:VERSION_CHARACTERS], model.device, model.dtype)


def main() -> int:
    """Load the reward model that the service asks for, and score calls until the service is gone."""
    channel = socket.socket(fileno=os.dup(0))
    _set_up()
    with contextlib.suppress(_GoneError):
        _load_and_serve(channel)
    return 0


def _load_and_serve(channel: socket.socket) -> None:
    frame = receive_frame(channel)
    request = None if frame is None else decode_request(frame)
    if not isinstance(request, Load):
        return
    try:
        model, loaded = load(request, channel)
    except UserError as error:
        _send(channel, LoadFailed(str(error)))
        return
    except _GoneError:
        raise
    except Exception as error:  # noqa: BLE001  libraries may raise anything; the user sees the reason
        log.warning("%s cannot be loaded\n%s", request.source, users_trace(error))
        _send(channel, LoadFailed(f"{request.source} cannot be loaded: {describe(error)}"))
        return
    _send(channel, loaded)
    ModelWorker(channel, model, max_batch_tokens=request.max_batch_tokens).run()


def _set_up() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with open(os.devnull) as nothing:  # the stdin that libraries see instead of the socket
        os.dup2(nothing.fileno(), 0)
    configure_logging("warning")


def _send(channel: socket.socket, reply: Reply) -> None:
    try:
        send_frame(channel, msgspec.msgpack.encode(reply))
    except OSError as error:
        raise _GoneError from error


def _of_tokenizer(error: Exception) -> str:
    return f"the tokenizer failed: {describe(error)}"


if __name__ == "__main__":
    sys.exit(main())
