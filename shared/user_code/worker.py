"""The process that runs synchronous reward functions, one call at a time, in its main thread.

It is forked from a server that has only done imports. The service kills it when a deadline passes, with all processes
that user code has started. No failure of user code is lost: every exception becomes verdicts, and a crash or an exit
closes the socket.
"""

import ctypes
import inspect
import math
import os
import resource
import signal
import socket
import sys

import msgspec

from services.rewarder.built_ins.built_in_rewards import built_in
from services.rewarder.reward_call import (
    CallError,
    RewardCall,
    RewardFunction,
    Verdict,
    arguments_for,
    describe,
    everyone,
    is_async,
    judge,
    printable,
    refused_kwargs,
    required_columns,
    users_trace,
)
from services.rewarder.sandbox.chosen import SandboxChoice, choose
from shared.errors import UserError
from shared.service.child_secrets import give_up_tracing
from shared.service.forked import let_go_of_fork_server
from shared.user_code.function_loading import load_function, read_function
from shared.user_code.module_sources import Sources
from shared.user_code.places import Places
from shared.user_code.worker_frames import (
    Answer,
    Inspect,
    Inspected,
    Ready,
    Refused,
    Reply,
    Started,
    Task,
    decode_request,
    encode_frame_body,
    receive_frame,
    send_frame,
)

_PR_SET_PDEATHSIG = 1
_SPARE_CPU_S = 5


class Limits(msgspec.Struct, frozen=True):
    """The limits of a worker, the places that reward modules may come from, and the sandbox for generated code."""

    memory_bytes: int
    open_files: int
    places: Places = Places()
    sandbox: SandboxChoice = SandboxChoice()


def main(channel: socket.socket, limits: Limits) -> None:
    """Serve requests from ``channel`` until the service is gone; never returns."""
    _set_up(limits)
    loaded: dict[tuple[str, str], RewardFunction] = {}
    versions: dict[str, Sources] = {}
    _send(channel, Ready())
    while (frame := receive_frame(channel)) is not None:
        request = decode_request(frame)
        if isinstance(request, Inspect):
            _send(channel, _inspect(request, limits))
        else:
            _serve(channel, request, limits, loaded, versions)
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
    _limit(resource.RLIMIT_AS, limits.memory_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    _limit(resource.RLIMIT_CORE, 0)
    choose(limits.sandbox)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_cpu(timeout_s: float) -> None:
    """Limit the processor time of the next step, in case the service is gone and cannot enforce the deadline."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    budget_s = timeout_s * (os.cpu_count() or 1) + _SPARE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + budget_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _send(channel: socket.socket, reply: Reply) -> None:
    send_frame(channel, encode_frame_body(reply))


def _inspect(request: Inspect, limits: Limits) -> Inspected | Refused:
    name, sources = request.function, request.sources
    known = built_in(name)
    try:
        if sources is not None:
            function = load_function(name, places=limits.places, sources=sources)
        else:
            function, sources = read_function(name, places=limits.places)
    except UserError as error:
        return Refused(str(error))
    except BaseException as error:  # noqa: BLE001  user code: a module may call sys.exit when imported
        return Refused(f"importing {name.partition(':')[0]} ended with {_describe(error, limits)}")
    why_not = known.why_not_usable(request.kwargs) if known else refused_kwargs(function, request.kwargs)
    if why_not is not None:
        return Refused(f"{name} {why_not}")
    if known is not None:
        return Inspected("built-in", known.summary, [list(columns) for columns in known.columns])
    return Inspected(
        "async" if is_async(function) else "sync",
        printable((inspect.getdoc(function) or "").partition("\n")[0]),
        [[column] for column in required_columns(function)],
        sources,
        "" if sources is None else sources.version,
    )


def _serve(
    channel: socket.socket,
    task: Task,
    limits: Limits,
    loaded: dict[tuple[str, str], RewardFunction],
    versions: dict[str, Sources],
) -> None:
    call = msgspec.msgpack.decode(task.call, type=RewardCall)
    num_completions = len(call.completions)
    try:
        if task.sources is not None:
            versions[task.version] = task.sources
        if (task.function, task.version) not in loaded:
            _limit_cpu(task.import_timeout_s)
            loaded[task.function, task.version] = load_function(
                task.function, places=limits.places, sources=versions.get(task.version)
            )
    except UserError as error:
        _send(channel, Started())
        _send(channel, Answer(everyone(num_completions, "error", str(error))))
        return
    except BaseException as error:  # noqa: BLE001  user code: a module may call sys.exit when imported
        _send(channel, Started())
        _send(
            channel, Answer(everyone(num_completions, "error", f"importing it ended with {_describe(error, limits)}"))
        )
        return
    _limit_cpu(task.timeout_s)
    _send(channel, Started())
    verdicts, trace = _call(task.function, loaded[task.function, task.version], call, limits)
    _send(channel, Answer(verdicts, trace))


def _call(name: str, function: RewardFunction, call: RewardCall, limits: Limits) -> tuple[list[Verdict], str]:
    num_completions = len(call.completions)
    known = built_in(name)
    if known is not None and (why_not := known.why_not(call.reward_kwargs.get(name, {}))):
        return everyone(num_completions, "error", why_not), ""
    try:
        options = () if known is None else known.not_from_columns()
        arguments = arguments_for(
            function,
            call,
            name=name,
            is_built_in=known is not None,
            options=options,
            may_be_given=None if known is None else known.options,
        )
        returned = function(**arguments)
        return judge(returned, num_completions, is_built_in=known is not None), ""
    except CallError as error:
        return everyone(num_completions, "error", str(error)), ""
    except BaseException as error:  # noqa: BLE001  user code; math-verify's own timeout is not an Exception either
        return everyone(num_completions, "error", _describe(error, limits)), users_trace(error)


def _describe(error: BaseException, limits: Limits) -> str:
    """Return the type and message of an exception in user code, and for a MemoryError also the limit."""
    if not isinstance(error, MemoryError):
        return describe(error)
    memory_mib = limits.memory_bytes // 2**20
    return f"{describe(error)} (a worker has {memory_mib} MiB of address space: HEADRACE_WORKER_MEMORY_MIB)"
