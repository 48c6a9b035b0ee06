"""An engine without a model: decode_clock.py computes the time of a request, and draws.py its tokens.

    requests: complete, sample ------------------> [DecodeClock] --timer at its next event--> futures of the requests
    pushes:   pause, take_on(version), resume ---------^

The generation loop, /v1/generate and the weight push use it like the real engine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.generator.engine.output_gate import UnverifiedError
from services.generator.inflight_window import EngineLoad
from services.generator.policy_api.generate_route import GenerateRequest, Sampled, SampledPrompt
from services.generator.rollouts import SampledCompletion
from services.generator.simulated.decode_clock import DecodeClock, DecodedSequence, Span
from services.generator.simulated.draws import DrawnCompletion, Draws, prompt_ids_of, text_of
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulation_settings import SimulationSettings
from shared.errors import MessageError, UnavailableError
from shared.lineage import LineageVersion
from shared.run_options.run_config import RunConfig


@dataclass(frozen=True, eq=False)
class SimulatedRequest:
    """One completion in progress. ``finished`` resolves to its version spans."""

    drawn: DrawnCompletion
    sequence: DecodedSequence
    finished: "asyncio.Future[list[Span]]"


class SimulatedEngine:
    """Engine of one simulated replica: completions are random, and end when their simulated time has passed.

    It runs on the event loop on which it was created.

    Args:
        settings: Settings of the simulation.
        facts: Facts about the model.
        index: Index of the replica; part of the random seed.
        max_model_len: Maximum tokens of prompt and completion together; None for no limit.
    """

    def __init__(
        self, settings: SimulationSettings, facts: ModelFacts, *, index: int, max_model_len: int | None
    ) -> None:
        self.facts = facts
        self.max_model_len = max_model_len
        self._speed_up = settings.speed_up
        self._draws = Draws(settings, facts, index=index)
        self._clock = DecodeClock(step_s=settings.decode_step_s, max_num_seqs=settings.max_num_seqs)
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._requests: dict[DecodedSequence, SimulatedRequest] = {}

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        config: RunConfig,
        request_id: str,
        max_tokens: int | None = None,
    ) -> list[SampledCompletion]:
        """Return ``num_completions`` random completions once their simulated time has passed.

        Each has ``max_tokens`` (default: ``max_completion_length``) tokens at most. Cancelling the call aborts them.

        Raises:
            MessageError: The prompt leaves no room for a completion, or has a token id outside the vocabulary.
            UnavailableError: The run is over, or the weights failed verification (UnverifiedError).
        """
        self._check_prompt(prompt_ids)
        most = max_tokens or config.max_completion_length
        requests = self.start(len(prompt_ids), n=num_completions, max_tokens=most)
        spans = await self.wait(requests)
        return [
            SampledCompletion(
                text=text_of(len(request.drawn.token_ids)),
                token_ids=request.drawn.token_ids,
                logprobs=request.drawn.logprobs,
                spans=[(str(version), start, end) for version, start, end in spans_of],
                finish_reason=request.drawn.finish_reason,
            )
            for request, spans_of in zip(requests, spans, strict=True)
        ]

    async def sample(self, prompt: str | Sequence[int], request: GenerateRequest) -> SampledPrompt:
        """Return ``request.n`` random completions for /v1/generate. Each position has only the sampled token's logprob.

        Raises:
            MessageError: The prompt leaves no room for a completion, or has a token id outside the vocabulary.
            UnavailableError: The run is over, or the weights failed verification (UnverifiedError).
        """
        prompt_ids = prompt_ids_of(prompt, self.facts) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(prompt_ids)
        options = request.sampling_options()
        started = self.start(
            len(prompt_ids),
            n=request.n,
            max_tokens=int(options["max_tokens"]),
            ignore_eos=bool(options.get("ignore_eos", False)),
        )
        spans = await self.wait(started)
        return SampledPrompt(
            prompt_ids,
            [
                Sampled(
                    token_ids=one.drawn.token_ids,
                    logprobs_TK=None if request.logprobs is None else [[logprob] for logprob in one.drawn.logprobs],
                    logprob_token_ids_TK=None
                    if request.logprobs is None
                    else [[token] for token in one.drawn.token_ids],
                    version_spans=[(version.policy_version, start, end) for version, start, end in spans_of],
                )
                for one, spans_of in zip(started, spans, strict=True)
            ],
        )

    def start(
        self, num_prompt_tokens: int, *, n: int, max_tokens: int, ignore_eos: bool = False
    ) -> list[SimulatedRequest]:
        """Begin ``n`` completions of one prompt, which share its prefill.

        Raises:
            MessageError: The prompt leaves no room for a completion.
        """
        if self.max_model_len is not None:
            max_tokens = min(max_tokens, self.max_model_len - num_prompt_tokens)
        if max_tokens < 1:
            raise MessageError(
                f"the prompt of {num_prompt_tokens} tokens is longer than the maximum model length of "
                f"{self.max_model_len}, or leaves no room for a completion"
            )
        self._advance()
        first_token_s = self._draws.first_token_s(num_prompt_tokens=num_prompt_tokens)
        requests: list[SimulatedRequest] = []
        for _ in range(n):
            drawn = self._draws.completion(max_tokens=max_tokens, ignore_eos=ignore_eos)
            sequence = DecodedSequence(len(drawn.token_ids), first_token_s)
            request = SimulatedRequest(drawn, sequence, self._loop.create_future())
            self._requests[sequence] = request
            self._clock.submit(sequence)
            requests.append(request)
        self._set_timer()
        return requests

    async def wait(self, requests: Sequence[SimulatedRequest]) -> list[list[Span]]:
        """Return the version spans of all requests once all have finished. Cancelling the call aborts them."""
        try:
            return [await request.finished for request in requests]
        finally:
            self._advance()
            for request in requests:
                self._clock.abort(request.sequence)
                self._requests.pop(request.sequence, None)
            self._set_timer()

    def num_tokens(self, request: SimulatedRequest) -> int:
        """Return how many tokens a completion has now."""
        self._advance()
        self._set_timer()
        return self._clock.num_tokens(request.sequence)

    def pause(self) -> None:
        """Pause decoding."""
        self._advance()
        self._clock.pause()
        self._set_timer()

    def resume(self) -> None:
        """Resume decoding."""
        self._advance()
        self._clock.resume()
        self._set_timer()

    def take_on(self, version: LineageVersion) -> None:
        """Sample with this version from the next token on."""
        self._advance()
        self._clock.set_version(version)
        self._set_timer()

    def abort_all(self) -> None:
        """Fail every request in progress with UnverifiedError: the weights that sample it failed verification."""
        self._advance()
        self._fail_all(UnverifiedError("its weights were taken out of service"))
        self._set_timer()

    def first_window(self, config: RunConfig) -> int:
        """Return the initial limit of groups in flight: the run's maximum, without a KV cache to overfill."""
        return config.max_inflight_groups

    def take_load(self) -> EngineLoad:
        """Return the current numbers of running and waiting requests. A KV cache is not simulated."""
        return EngineLoad(num_running=self._clock.num_admitted, num_waiting=self._clock.num_waiting)

    def close(self) -> None:
        """Stop decoding for good, and fail all requests in progress with UnavailableError, because the run is over."""
        self._advance()
        self._clock.pause()
        self._fail_all(UnavailableError("the run of this request is over"))
        self._set_timer()

    def _fail_all(self, error: UnavailableError) -> None:
        for request in self._requests.values():
            self._clock.abort(request.sequence)
            if not request.finished.done():
                request.finished.set_exception(error)
        self._requests.clear()

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if any(not 0 <= token < self.facts.vocab_size for token in prompt_ids):
            raise MessageError(f"a token id of the prompt is out of vocabulary, which has {self.facts.vocab_size}")

    def _advance(self) -> None:
        for sequence in self._clock.advance(self._now_s()):
            request = self._requests.pop(sequence)
            if not request.finished.done():
                request.finished.set_result(sequence.spans)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._clock.next_event_s()
        if due_s is not None:
            self._timer = self._loop.call_at(self._started_at + due_s / self._speed_up, self._on_timer)

    def _on_timer(self) -> None:
        self._advance()
        self._set_timer()

    def _now_s(self) -> float:
        return (self._loop.time() - self._started_at) * self._speed_up
