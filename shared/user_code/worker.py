"""The process that runs users' functions, one call at a time, in its main thread.

It is forked from a server that has only done imports. The service kills it when a deadline passes, with all processes
that user code has started. No failure of user code is lost: every exception becomes a reply, and a crash or an exit
closes the socket.
"""

import ctypes
import os
import signal
import socket
import sys
from typing import Any

import msgspec

from shared.errors import UserError
from shared.service.child_secrets import give_up_tracing
from shared.service.forked import let_go_of_fork_server
from shared.user_code.call_output import limit_output
from shared.user_code.error_text import printable
from shared.user_code.limits import Limits, is_out_of_memory, limit_cpu
from shared.user_code.module_sources import Sources
from shared.user_code.task_kind import Function, TaskKind
from shared.user_code.worker_frames import (
    Inspect,
    Ready,
    Refused,
    Started,
    Task,
    decode_request,
    encode_frame_body,
    receive_frame,
    send_frame,
)

_PR_SET_PDEATHSIG = 1
_Kind = TaskKind[Any, Any]


def main(channel: socket.socket, limits: Limits, kind: _Kind) -> None:
    """Serve requests from ``channel`` until the service is gone; never returns."""
    _set_up(limits)
    kind.set_up()
    outputs = limit_output()
    loaded: dict[tuple[str, str], Function] = {}
    versions: dict[str, Sources] = {}
    _send(channel, Ready())
    while (frame := receive_frame(channel)) is not None:
        request = decode_request(frame)
        for output in outputs:
            output.begin_call()
        if isinstance(request, Inspect):
            _send(channel, _inspect(request, limits, kind))
        else:
            _send(channel, _serve(channel, request, limits, kind, loaded, versions))
        signal.alarm(0)  # an alarm or a timer left by user code would hit the next call
        signal.setitimer(signal.ITIMER_PROF, 0)
    # Threads left by user code must not keep the process alive.
    os._exit(0)


def _set_up(limits: Limits) -> None:
    os.setsid()  # one signal can then kill all processes that user code starts, and Ctrl-C reaches only the service
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    give_up_tracing()
    let_go_of_fork_server()  # the kernel kills this process when the fork server ends, as set above
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    limits.set()


def _send(channel: socket.socket, reply: msgspec.Struct) -> None:
    try:
        send_frame(channel, encode_frame_body(reply))
    except OSError:  # the service is gone, or does not want this worker any more
        os._exit(0)


def _inspect(request: Inspect, limits: Limits, kind: _Kind) -> msgspec.Struct:
    name, sources = request.function, request.sources
    try:
        if sources is not None:
            function = kind.load(name, sources)
        else:
            function, sources = kind.read(name)
    except UserError as error:
        return Refused(f"{error}{limits.hint(error)}")
    except BaseException as error:  # noqa: BLE001  user code: a module may call sys.exit when imported
        return Refused(f"importing {name.partition(':')[0]} ended with {limits.describe(error)}")
    described: msgspec.Struct = kind.describe(name, function, sources, request.kwargs)
    return described


def _serve(
    channel: socket.socket,
    task: Task,
    limits: Limits,
    kind: _Kind,
    loaded: dict[tuple[str, str], Function],
    versions: dict[str, Sources],
) -> msgspec.Struct:
    key = task.function, task.version
    try:
        if task.sources is not None:
            versions[task.version] = task.sources
        if key not in loaded:
            limit_cpu(task.import_timeout_s)
            loaded[key] = kind.load(task.function, versions.get(task.version))
    except UserError as error:
        return Refused(f"{printable(str(error))}{limits.hint(error)}", is_out_of_memory(error))
    except BaseException as error:  # noqa: BLE001  user code: a module may call sys.exit when imported
        return Refused(f"importing it ended with {limits.describe(error)}", is_out_of_memory(error))
    limit_cpu(task.timeout_s)
    _send(channel, Started())
    answer: msgspec.Struct = kind.call(task.function, loaded[key], task.call, limits)
    return answer
