"""One reward model: its calls, and the process that answers them. Replaces the process when it hangs or dies.

    call --> waits until the model is loaded --> waits in its process's queue --> is scored --> answer
             (load_timeout_s)                    (queue_timeout_s)                (timeout_s)

The deadline of a call starts when the model begins to score it. A call that misses its deadline is a timeout, and calls
scored in the same pass continue. The process is killed when one piece of work takes longer than the longest deadline of
its calls, and longer than min_hang_s (10 s). These calls are timeouts then, and other calls go to the next process.

If the process dies by itself, the next process scores its calls again. A call during which two processes died is an
error, because it may be the cause.
"""

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from services.rewarder.reward_answer import Answer
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
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
)
from services.rewarder.reward_models.model_name import ModelPlace
from services.rewarder.reward_models.model_process import Activity, ModelDiedError, ModelProcess
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.waiting_call import WaitingCall
from shared.user_code.error_text import describe
from shared.user_code.fork_server import describe_exit

log = logging.getLogger(__name__)

_RETRY_LOAD_AFTER_S = 30.0
"""Seconds until loading is tried again after a failure. A check tries again at once."""


class ServedModel:
    """A reward model that is loaded at its first call or check, and loaded again after its process has ended."""

    def __init__(self, name: str, place: ModelPlace, settings: ModelSettings, metrics: RewardModelMetrics) -> None:
        self.name = name
        self.place = place
        self._settings = settings
        self._metrics = metrics
        self._ids = itertools.count()
        self._calls: dict[int, WaitingCall] = {}
        self._process: ModelProcess | None = None
        self._serving: asyncio.Task[None] | None = None
        self._revision = place.revision
        self._described: Described | None = None
        self._loaded: Loaded | None = None
        self._failure: tuple[str, float] | None = None
        self._changed = asyncio.Event()
        self._activity: Activity | None = None
        self._longest_timeout_s = 0.0
        self._has_died_loading = False

    @property
    def is_busy(self) -> bool:
        """Whether a caller waits for an answer of the model."""
        return bool(self._calls)

    @property
    def is_up(self) -> bool:
        """Whether the model has a process or is starting one."""
        return self._serving is not None and not self._serving.done()

    @property
    def loaded(self) -> Loaded | None:
        """The loaded model's description, or None while it is not loaded."""
        return self._loaded

    @property
    def described(self) -> Described | None:
        """The description from the model's config, or None until the config was read."""
        return self._described

    @property
    def pid(self) -> int | None:
        """The id of the model's process, or None without a process; for logs."""
        return None if self._process is None else self._process.pid

    async def call(self, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """Score a call with the model; return the answer and the seconds from the start of scoring.

        Raises:
            RewardFailure: The model cannot be loaded, did not begin or end in time, or failed.
        """
        score = Score(next(self._ids), lane, call.prompts, call.completions, call.chat_template_kwargs)
        waiting = WaitingCall(score, timeout_s=timeout_s)
        self._longest_timeout_s = max(self._longest_timeout_s, timeout_s)
        failure = self.recent_failure()
        if failure is not None:
            raise RewardFailure("error", failure)
        self._calls[score.id] = waiting
        try:
            self._ensure_serving()
            if self._process is not None:
                self._process.send(score)
            answered: tuple[Answer, float] | None = None
            while answered is None:
                await self._wait_until_loaded(waiting)
                answered = await waiting.answered(queue_timeout_s=self._settings.queue_timeout_s)
            return answered
        finally:
            del self._calls[score.id]
            if waiting.answer.done():
                waiting.answer.exception()  # marks it as retrieved, in case the caller was cancelled
            elif self._process is not None:
                self._process.send(Cancel(score.id))

    async def check(self, *, timeout_s: float) -> str | None:
        """Load the model if it is not loaded. Return the reason why it cannot be loaded, or None.

        None means that the model is loaded, or that its config was accepted within ``timeout_s`` seconds.
        """
        if self._failure is not None and self._serving is not None:
            await asyncio.wait({self._serving})  # the failed process may not have ended yet
        self._failure = None
        self._ensure_serving()
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self._loaded is not None or self._failure is not None)
        except TimeoutError:
            if self._described is None:
                return f"{self.name} could not be checked within {timeout_s:g} s; try again"
        return None if self._failure is None else self._failure[0]

    async def close(self) -> None:
        """End the model's process. Waiting calls fail with an error."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for call in self._calls.values():
            call.fail("error", "the reward model was unloaded")

    def recent_failure(self) -> str | None:
        """Return why loading failed in the last 30 seconds, or None. While there is a reason, calls fail at once."""
        if self._failure is not None and time.monotonic() - self._failure[1] >= _RETRY_LOAD_AFTER_S:
            self._failure = None
        return None if self._failure is None else self._failure[0]

    async def _wait_until_loaded(self, call: WaitingCall) -> None:
        if self._loaded is not None:
            return
        loaded = asyncio.create_task(self._until(lambda: self._loaded is not None), name=f"wait for {self.name}")
        try:
            # A process that is not loaded within load_timeout_s is killed, so this wait ends too.
            futures: set[asyncio.Future[Any]] = {loaded, call.answer}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loaded.cancel()

    def _ensure_serving(self) -> None:
        if not self.is_up:
            # An empty context: the task outlives the first call, and its log lines must not name that call's group.
            nobodys = contextvars.Context()
            self._serving = asyncio.create_task(self._serve(), name=f"reward model {self.name}", context=nobodys)
            self._serving.add_done_callback(self._say_why_it_ended, context=nobodys)

    def _say_why_it_ended(self, serving: "asyncio.Task[None]") -> None:
        """Fail all waiting calls if the task that talks to the model's process ended with an unexpected error."""
        error = None if serving.cancelled() else serving.exception()
        if error is None:
            return
        log.error("talking to the process of reward model %s failed", self.name, exc_info=error)
        detail = f"the rewarder failed to talk to the process of {self.name}: {describe(error)}"
        self._fail(detail)
        for call in self._calls.values():
            call.fail("error", detail)

    async def _serve(self) -> None:
        """Keep a process of the model running, and replace it while calls wait.

        Return when the process has ended and no call waits, or when the model cannot be loaded.
        """
        while True:
            await self._serve_one_process()
            if self._failure is not None:
                for call in self._calls.values():
                    call.fail("error", self._failure[0])
                return
            waiting = [call for call in self._calls.values() if not call.answer.done()]
            if not waiting and not self._has_died_loading:
                return
            for call in waiting:
                call.requeue()

    async def _serve_one_process(self) -> None:
        try:
            process = await ModelProcess.start()
        except OSError as error:
            self._fail(f"no process could be started for {self.name} ({error})")
            return
        self._process = process
        reason = "unloaded"
        try:
            settings = self._settings
            process.send(
                Load(self.place.source, self._revision, settings.device, settings.dtype, settings.max_batch_tokens)
            )
            for call in self._calls.values():
                if not call.answer.done():
                    process.send(call.score)
            self._activity = Activity.begun(settings.load_timeout_s)
            reason = await self._converse(process)
        finally:
            is_up = self._loaded is not None
            activity, self._activity, self._process, self._loaded = self._activity, None, None, None
            if is_up:
                self._metrics.loaded.dec()
            self._metrics.kills.labels(reason).inc()
            exit_code = await process.kill()
        if reason != "failed":
            self._blame(activity, is_hung=reason == "timeout", how=describe_exit(exit_code), was_up=is_up)

    async def _converse(self, process: ModelProcess) -> str:
        """Handle the process's replies until it must end. Return the reason: ``timeout``, ``died`` or ``failed``."""
        while True:
            try:
                async with asyncio.timeout_at(self._patience()):
                    reply = await process.receive()
            except TimeoutError:
                return "timeout"
            except ModelDiedError:
                return "died"
            if isinstance(reply, LoadFailed):
                self._fail(reply.detail)
                return "failed"
            self._handle(reply)

    def _patience(self) -> float | None:
        return None if self._activity is None else asyncio.get_running_loop().time() + self._activity.left_s()

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, Described):
            self._described = reply
            self._revision = reply.revision  # a later process loads the same commit
        elif isinstance(reply, Loaded):
            log.info("reward model %s is loaded by process %s: %s", self.name, self.pid, reply)
            self._loaded, self._activity, self._has_died_loading = reply, None, False
            self._metrics.loads.labels("loaded").inc()
            self._metrics.loaded.inc()
            self._tell()
        elif isinstance(reply, Working):
            self._note_activity(reply)
        elif isinstance(reply, Passed):
            self._metrics.observe_pass(self.name, reply)
        elif isinstance(reply, Scored):
            self._take_answer(reply)

    def _note_activity(self, working: Working) -> None:
        known = [self._calls[id_] for id_ in working.ids if id_ in self._calls]
        if working.is_scoring:
            for call in known:
                call.begin()
        limit_s = max([self._settings.min_hang_s, *([call.timeout_s for call in known] or [self._longest_timeout_s])])
        self._activity = Activity.begun(limit_s, working.ids) if working.ids else None

    def _take_answer(self, scored: Scored) -> None:
        call = self._calls.get(scored.id)
        if call is None or call.answer.done() or self._loaded is None:
            return
        if len(scored.verdicts) != len(call.score.completions):
            call.fail("error", "the model's process broke the protocol")
            return
        call.begin()
        call.answer.set_result(Answer(scored.verdicts, version=self._loaded.version))

    def _blame(self, activity: Activity | None, *, is_hung: bool, how: str, was_up: bool) -> None:
        """Fail or mark the calls that a process worked on when it ended, or record that loading the model failed."""
        if not was_up:
            self._blame_loading(is_hung=is_hung, how=how)
            return
        log.warning("the process of reward model %s is gone: %s", self.name, "it hung" if is_hung else how)
        for id_ in activity.ids if activity is not None else ():
            call = self._calls.get(id_)
            if call is not None and is_hung and activity is not None:
                call.fail("timeout", f"took longer than {activity.limit_s:g} s, and the model's process was killed")
            elif call is not None:
                call.note_death(how)

    def _blame_loading(self, *, is_hung: bool, how: str) -> None:
        if is_hung:
            self._fail(f"loading {self.name} took longer than {self._settings.load_timeout_s:g} s")
        elif self._has_died_loading:
            self._fail(f"the process that loaded {self.name} died, and so did the next: {how}")
        else:
            log.warning("the process that loaded reward model %s died: %s. It is loaded once more", self.name, how)
            self._has_died_loading = True

    def _fail(self, detail: str) -> None:
        self._has_died_loading = False
        log.warning("reward model: %s", detail)
        self._metrics.loads.labels("failed").inc()
        self._failure = (detail, time.monotonic())
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
