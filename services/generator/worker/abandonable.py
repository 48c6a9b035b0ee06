"""Runs blocking calls that can be abandoned: a store may stall for minutes, and a rank may never come."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_LOOK_EVERY_S = 0.02
_ResultT = TypeVar("_ResultT")


def abandonable(work: Callable[[], _ResultT], check: Callable[[], None]) -> _ResultT:
    """Run ``work`` in a thread and return its result, calling ``check`` every 20 ms meanwhile.

    If ``check`` raises, the thread is abandoned and the error is passed on.
    """
    result: Future[_ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again below
            result.set_exception(error)

    check()
    threading.Thread(target=run, name="receive weights", daemon=True).start()
    while not wait([result], timeout=_LOOK_EVERY_S).done:
        check()
    return result.result()
