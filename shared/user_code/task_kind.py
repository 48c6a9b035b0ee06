"""Defines a kind of task: how the workers of one service load, call and describe users' functions.

    service                         worker
      WorkerPool(kind) --start-->   kind.set_up
                       --Task--->   kind.load, kind.call   --> an answer
                       --Inspect->  kind.read, kind.describe --> a description

A worker gets its copy of the kind when it is started, pickled by the service itself. All later messages are msgpack.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import msgspec

from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused, Reply, TaskAnswer, decode_frame

AnswerT_co = TypeVar("AnswerT_co", bound=TaskAnswer, covariant=True)
DescriptionT_co = TypeVar("DescriptionT_co", bound=msgspec.Struct, covariant=True)
AnswerT = TypeVar("AnswerT", bound=TaskAnswer)
DescriptionT = TypeVar("DescriptionT", bound=msgspec.Struct)
Function = Callable[..., Any]


class TaskKind(Protocol[AnswerT_co, DescriptionT_co]):
    """The interface with which workers load, call and describe one kind of user function: reward functions or tools.

    Answers and descriptions are tagged structs, so that a reply says which of them it is.
    """

    @property
    def places(self) -> Places:
        """The operator's directories and packages from which functions may be loaded."""
        ...

    @property
    def preload(self) -> Sequence[str]:
        """The modules that the fork server imports once for all workers."""
        ...

    @property
    def answer_type(self) -> type[AnswerT_co]:
        """The struct with which a worker answers a call."""
        ...

    @property
    def description_type(self) -> type[DescriptionT_co]:
        """The struct with which a worker describes a function."""
        ...

    def set_up(self) -> None:
        """Prepare a new worker process for its tasks. Called in the worker."""
        ...

    def load(self, name: str, sources: Sources | None) -> Function:
        """Load a function from ``sources``, or from the current files if that is None. Called in the worker.

        Raises:
            UserError: The function cannot be loaded.
            BaseException: An exception of the user's module.
        """
        ...

    def read(self, name: str) -> tuple[Function, Sources | None]:
        """Load a function from the current files. Return it with their version, if it has one. Called in the worker.

        Raises:
            UserError: The function cannot be loaded.
            BaseException: An exception of the user's module.
        """
        ...

    def call(self, name: str, function: Function, call: msgspec.Raw, limits: Limits) -> AnswerT_co:
        """Call the function, and return its answer or its exception as an answer. Called in the worker."""
        ...

    def describe(
        self, name: str, function: Function, sources: Sources | None, kwargs: Mapping[str, Any]
    ) -> DescriptionT_co | Refused:
        """Describe the function, or refuse it if it cannot take these keyword arguments. Called in the worker."""
        ...


def decode_reply(kind: TaskKind[AnswerT, DescriptionT], data: bytes) -> Reply | AnswerT | DescriptionT:
    """Decode a worker's reply from the bytes of a frame. Raises msgspec.DecodeError if they are not valid."""
    reply: Reply | AnswerT | DescriptionT = decode_frame(_decoder(kind.answer_type, kind.description_type), data)
    return reply


@lru_cache
def _decoder(answer_type: type[Any], description_type: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Reply | answer_type | description_type)
