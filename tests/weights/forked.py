"""Trainers and receivers as separate processes that start fast: they are forked from a process with torch imported.

Commands and answers go through a pipe. A trainer can be held at a step of a push, and a receiver before it scores a
probe, so that a test can cause a fault at exactly that moment.
"""

import asyncio
import contextlib
import functools
import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Generator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from services.trainer.push.communicator_epochs import CommunicatorEpochs
from services.trainer.push.gloo_communicator import GlooCommunicator
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.weight_sender import WeightSender
from shared.errors import HeadraceError, PushError
from shared.redis.redis_connection import connect
from tests.weights.exact_engine import ExactEngine
from tests.weights.known_weights import interrupted, make_policy, prober_of
from tests.weights.replica import KEY, RUN_ID
from tests.weights.served_receiver import ServedReceiver, serve

JOIN, RENDEZVOUS, TRANSFER, COMMIT, PROBE = "join", "rendezvous", "transfer", "commit", "probe"
STEPS = (JOIN, RENDEZVOUS, TRANSFER, COMMIT, PROBE)
GRACE_S = 5.0
INFO_TIMEOUT_S = 6.0
"""How long a trainer waits for a replica's answer about itself; on a busy machine, 3 s are not enough."""
_AT_PARAMETER = 8
_context = multiprocessing.get_context("forkserver")
_server = forkserver.ForkServer()
"""A fork server of its own: workers with user code, which other tests start, must not have torch's address space."""
_server.set_forkserver_preload([__name__])


class Forked:
    """A process that runs ``role`` with its end of the pipe and the arguments."""

    def __init__(self, role: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=role, args=(theirs, *arguments), daemon=True)
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, *command: Any) -> None:
        """Send a command without waiting for an answer."""
        self._pipe.send(command)

    async def answer(self, *, within_s: float) -> Any:
        """Return the next answer."""
        async with asyncio.timeout(within_s):
            while not self._pipe.poll():  # noqa: ASYNC110  the other process cannot set an event
                await asyncio.sleep(0.01)
        return self._pipe.recv()

    async def ask(self, *command: Any, within_s: float = 120.0) -> Any:
        """Send a command and return the answer."""
        self.tell(*command)
        return await self.answer(within_s=within_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(timeout=120)
        self._pipe.close()


@contextlib.contextmanager
def forked(role: Callable[..., None], *arguments: Any) -> Generator[Forked]:
    process = Forked(role, *arguments)
    try:
        yield process
    finally:
        process.kill()


def trainer(pipe: Connection, redis_url: str, model_dir: str, incarnation: int, push_timeout_s: float) -> None:
    """Role: ("push", version, seed, step at which to hold, or None) -> ("held",), and after ("go",) the result."""
    asyncio.run(_train(pipe, redis_url, Path(model_dir), incarnation, push_timeout_s))


def receiver(pipe: Connection, replica_id: str, model_dir: str) -> None:
    """Role: sends its url; ("hold probes", whether) -> None, ("is at probe",) -> whether, ("info",) -> its state."""
    asyncio.run(_receive(pipe, replica_id, model_dir))


async def _train(pipe: Connection, redis_url: str, model_dir: Path, incarnation: int, push_timeout_s: float) -> None:
    held_at = _Hold(pipe)
    held_at.install()
    sender = WeightSender(
        connect(redis_url),
        PushSettings(
            run_id=RUN_ID,
            internal_key=KEY,
            transport="gloo",
            push_timeout_s=push_timeout_s,
            incarnation=incarnation,
            info_timeout_s=INFO_TIMEOUT_S,
            buffer_bytes=20_000,
        ),
    )
    while True:
        command, *arguments = await asyncio.to_thread(pipe.recv)
        try:
            if command == "push":
                version, seed, held_at.step = arguments
                policy = make_policy(model_dir, seed=seed)
                prober = prober_of(policy)
                weights = interrupted(policy, at=_AT_PARAMETER, by=lambda: held_at.wait(TRANSFER))
                result = await sender.push(weights, policy_version=version, prober=prober)
                pipe.send(("pushed", result.failed, result.members, result.total_s))
            elif command == "needs push":
                pipe.send(await sender.needs_push())
            else:
                pipe.send(vitals())
        except HeadraceError as error:
            pipe.send((type(error).__name__, str(error)))


class _Hold:
    """Reports that a step is reached, and waits for permission to go on."""

    def __init__(self, pipe: Connection) -> None:
        self.step: str | None = None
        self._pipe = pipe

    def wait(self, step: str) -> None:
        if step == self.step:
            self.step = None
            self._pipe.send(("held",))
            if self._pipe.recv() == ("break off",):
                raise PushError("told to break off")

    def install(self) -> None:
        for name, step in (("join", JOIN), ("commit", COMMIT)):
            setattr(CommunicatorEpochs, name, self._before(getattr(CommunicatorEpochs, name), step))
        rendezvous = GlooCommunicator.rendezvous

        def held_rendezvous(communicator: GlooCommunicator, **arguments: Any) -> None:
            self.wait(RENDEZVOUS)
            rendezvous(communicator, **arguments)

        setattr(GlooCommunicator, "rendezvous", held_rendezvous)  # noqa: B010  or type checkers compare the signatures

    def _before(self, method: Any, step: str) -> Any:
        @functools.wraps(method)
        async def held(epochs: CommunicatorEpochs, members: Any, **arguments: Any) -> Any:
            await asyncio.to_thread(self.wait, step)
            return await method(epochs, members, **arguments)

        return held


async def _receive(pipe: Connection, replica_id: str, model_dir: str) -> None:
    engine = ExactEngine(model_dir)
    async with serve(replica_id, engine=engine, grace_s=GRACE_S) as served:
        pipe.send(served.url)
        watch = asyncio.create_task(_end_when_stuck(served), name="end when stuck")
        while not watch.done():
            command, *arguments = await asyncio.to_thread(pipe.recv)
            if command == "hold probes":
                (engine.probes_go_on.clear if arguments[0] else engine.probes_go_on.set)()
                pipe.send(None)
            elif command == "is at probe":
                pipe.send(engine.is_at_probe)
            elif command == "info":
                pipe.send(
                    (served.receiver.held_version, served.receiver.decoding_is_paused, served.receiver.fatal.is_set())
                )
            else:
                pipe.send(vitals())


async def _end_when_stuck(served: ServedReceiver) -> None:
    """End as a generator does; its supervisor would restart it."""
    await served.receiver.fatal.wait()
    os._exit(1)


def vitals() -> tuple[int, int, int]:
    """Return this process's resident memory in bytes, open file descriptors, and threads, without garbage."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()
