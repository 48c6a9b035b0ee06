"""Samples the turns of conversations, in the run that this replica serves.

    TurnRequest --> [thread: rendered] --> gate --> engine: n completions --> [thread: parsed] --> n SampledTurns

A request passes the weight gate and the output gate like a prompt group, and with the same sampling options. Rendering
and parsing happen in one thread, so that a long conversation does not hold up the event loop, and a tokenizer is never
used by two threads.
"""

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from services.generator.generation_loop import WITHOUT_WEIGHTS_S, WeightGate, until_verified
from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts import SampledCompletion, version_spans
from services.generator.service_state import ServiceState
from services.generator.turns.chat_format import ChatFormat
from services.generator.turns.turn_answers import TurnAnswers
from shared.arrays import pack_ids, pack_logprobs, unpack_ids
from shared.errors import MessageError, UnavailableError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.run_options.run_config import RunConfig
from shared.turns import SampledTurn, TurnRefusal, TurnRefusedError, TurnRequest

_LOOK_EVERY_S: Final = 1.0
"""Seconds between two checks for weights."""
_ResultT = TypeVar("_ResultT")


class TurnEngine(Protocol):
    """The methods of an engine that turns are sampled with; engine/engine.py implements them with vLLM."""

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and completion together; None for no limit."""
        ...

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        config: RunConfig,
        request_id: str,
        max_tokens: int | None = None,
    ) -> Sequence[SampledCompletion]:
        """Sample completions of at most ``max_tokens`` tokens; None means the run's ``max_completion_length``.

        Cancelling the call aborts the request.

        Raises:
            MessageError: The model cannot take the prompt.
        """
        ...


class TurnSampler:
    """Samples the turns of one run's conversations.

    Args:
        engine: Samples the completions.
        run_id: Id of the run.
        config: The run's sampling options.
        gate: Reports the version that the engine holds, and waits until it may be used.
        required_version: Returns the oldest version that the run allows.
        chat_format: Converts between the run's messages and token ids.
        metrics: Metrics of this process.
    """

    def __init__(
        self,
        engine: TurnEngine,
        *,
        run_id: str,
        config: RunConfig,
        gate: WeightGate,
        required_version: Callable[[], LineageVersion],
        chat_format: ChatFormat,
        metrics: GeneratorMetrics,
    ) -> None:
        self.run_id = run_id
        self._engine = engine
        self._config = config
        self._gate = gate
        self._required_version = required_version
        self._format = chat_format
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="turns")

    async def sample(self, request: TurnRequest) -> list[SampledTurn | TurnRefusal]:
        """Sample the ``n`` turns of a request, and return a turn or a refusal for each. Cancelling the call aborts all.

        Raises:
            TurnRefusedError: The conversation cannot be rendered, or leaves no room for a completion.
            MessageError: The model cannot take these token ids.
            UnavailableError, EngineDiedError: The engine failed, or the replica has had no weights for long.
        """
        started_at_s = time.time()
        appended, prompt_ids = await self._in_thread(lambda: self._prompt(request))
        max_tokens = self._max_tokens(request, num_prompt_tokens=len(prompt_ids))
        completions = await self._while_there_are_weights(self._complete(request, prompt_ids, max_tokens=max_tokens))
        self._metrics.tokens.inc(sum(len(completion.token_ids) for completion in completions))
        return await self._in_thread(
            lambda: [self._turn(request, appended, completion, started_at_s) for completion in completions]
        )

    def close(self) -> None:
        """Cancel queued work of the rendering thread, without waiting for the work that it does now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _complete(
        self, request: TurnRequest, prompt_ids: Sequence[int], *, max_tokens: int
    ) -> Sequence[SampledCompletion]:
        await self._gate.wait_open(NO_WEIGHTS)  # it held the required version when it accepted the turn
        return await until_verified(
            lambda request_id: self._engine.complete(
                prompt_ids, num_completions=request.n, config=self._config, request_id=request_id, max_tokens=max_tokens
            ),
            request_id=f"{request.run_id}-{request.request_id}",
            gate=self._gate,
            required_version=self._required_version,
        )

    async def _while_there_are_weights(self, work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        """Return the result of ``work``, or cancel it if this replica has no weights for WITHOUT_WEIGHTS_S.

        The client can then ask another replica.

        Raises:
            UnavailableError: There were no weights for WITHOUT_WEIGHTS_S.
        """
        task = asyncio.create_task(work, name="turn with weights")
        had_weights_at = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
                now = time.monotonic()
                if self._gate.held_version != NO_WEIGHTS:
                    had_weights_at = now
                elif now - had_weights_at > WITHOUT_WEIGHTS_S:
                    raise UnavailableError(f"this replica has had no weights for {WITHOUT_WEIGHTS_S:.0f} s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _prompt(self, request: TurnRequest) -> tuple[list[int], list[int]]:
        """Return the newly rendered ids, and the whole prompt: the recorded ids followed by the rendered ones."""
        appended = self._format.appended_ids(request)
        return appended, unpack_ids(request.recorded_ids).tolist() + appended

    def _turn(
        self, request: TurnRequest, appended: Sequence[int], completion: SampledCompletion, started_at_s: float
    ) -> SampledTurn | TurnRefusal:
        """Return a completion as a turn; as a refusal if it must not be trained on."""
        try:
            spans = version_spans(f"turn {request.request_id}", completion)
        except MessageError as error:
            return TurnRefusal("sampling", str(error))
        return SampledTurn(
            appended_ids=pack_ids(appended),
            token_ids=pack_ids(completion.token_ids),
            logprobs=pack_logprobs(completion.logprobs),
            version_spans=spans,
            finish_reason=completion.finish_reason,
            message=self._format.message(request, completion),
            started_at_s=started_at_s,
            ended_at_s=time.time(),
        )

    def _max_tokens(self, request: TurnRequest, *, num_prompt_tokens: int) -> int:
        most = min(request.max_tokens or self._config.max_completion_length, self._config.max_completion_length)
        limits = {
            "the context of the model": self._engine.max_model_len,
            "the rollout": request.max_row_tokens or None,
        }
        known = [(limit, where) for where, limit in limits.items() if limit is not None]
        if not known:
            return most
        longest, where = min(known)
        if num_prompt_tokens >= longest:
            raise TurnRefusedError(
                f"the conversation has {num_prompt_tokens} tokens, and {where} {longest}, which leaves no room for "
                "another turn; end it here, or raise the run's max_completion_length, or its vllm.max_model_len",
                kind="context_length",
            )
        return min(most, longest - num_prompt_tokens)

    async def _in_thread(self, work: Callable[[], _ResultT]) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class TurnDesk:
    """Passes turn requests to the sampler of the run that this replica serves.

    Args:
        state: Tells why this replica is not ready.
    """

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._sampler: TurnSampler | None = None
        self._answering = weakref.WeakSet[TurnAnswers]()

    @contextlib.contextmanager
    def serving(self, sampler: TurnSampler | None) -> Generator[None]:
        """Sample turns with ``sampler`` while the block runs; None if the run has no turns.

        When the block ends, turns in progress are aborted, and ``sampler`` is closed.
        """
        self._sampler = sampler
        try:
            yield
        finally:
            self._sampler = None
            for answers in self._answering:
                answers.close()
            if sampler is not None:
                sampler.close()

    def sample(self, requests: Sequence[TurnRequest]) -> TurnAnswers:
        """Begin to sample turns of one run. The caller closes the returned TurnAnswers.

        Raises:
            TurnRefusedError: Another run is served.
            UnavailableError: The replica is not ready.
        """
        sampler, reason = self._sampler, self._state.why_not_ready()
        run_id = requests[0].run_id
        if sampler is not None and run_id != sampler.run_id:
            raise TurnRefusedError(
                f"this replica serves run {sampler.run_id}, not {run_id[:200]}; ask a replica that is registered for "
                "the run",
                kind="another_run",
            )
        if sampler is None or reason is not None:
            raise UnavailableError(f"this replica is not ready: {reason or 'it samples no turns now'}")
        answers = TurnAnswers(requests, sample=sampler.sample)
        self._answering.add(answers)
        return answers
