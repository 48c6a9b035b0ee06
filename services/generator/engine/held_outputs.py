"""Sends the tokens of a request to the generator's process in pieces, instead of one at each step.

    sampled tokens --> held --> sent when the request ends, when there are 32, or in a pause

vLLM's engine core sends each token of each request at once, although a prompt group is read only when it is complete.
For a small model, sending and reading takes longer than computing. Only requests whose reader waits for the end, and
that have no stop strings, are held: vLLM looks for stop strings in the process that reads.

A pause is complete only once nothing is held. So tokens are sent before the weights can change, and vLLM labels them
with the version that sampled them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

_MAX_TOKENS = 32
"""Reading takes some microseconds a token, and the reading process does nothing else meanwhile."""
_NOT_HELD = (
    "finish_reason",
    "new_prompt_logprobs_tensors",
    "prompt_token_id_logprobs",
    "pooling_output",
    "routed_experts",
    "new_sampling_mask",
    "kv_transfer_params",
    "ec_transfer_params",
)
"""Fields of EngineCoreOutput. An output with any of them is sent at once."""


class HeldOutputs:
    """Mixin for a scheduler: holds back the tokens of requests that are read only at their end.

    It sends them in pieces, so that the generator's process has less to read.
    """

    requests: dict[str, Any]
    pause_state: PauseState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[Any]] = {}

    def has_requests(self) -> bool:
        """Return whether another step is needed: for requests, or to send held outputs in a pause."""
        inherited: Any = super()
        return bool(inherited.has_requests()) or self._is_due()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Finish requests before their own end, for example when they are aborted, and discard their held outputs."""
        inherited: Any = super()
        finished: list[Any] = inherited.finish_requests(*args, **kwargs)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs to send after a step, by client index. Other outputs are held for later steps."""
        inherited: Any = super()
        by_client: dict[int, Any] = inherited.update_from_output(*args, **kwargs)
        for sent in by_client.values():
            sent.outputs = [output for output in map(self._hold_or_join, sent.outputs) if output is not None]
        if self._is_due():
            self._send_all(by_client)
        return by_client

    def _is_due(self) -> bool:
        return bool(self._held) and self.pause_state != PauseState.UNPAUSED

    def _hold_or_join(self, output: Any) -> Any:
        """Return the output joined with the earlier ones that were held, or None if it is held too."""
        held = self._held.get(output.request_id)
        if held is None:
            if not self._may_hold(output):
                return output
            self._held[output.request_id] = [output]
            return None
        held.append(output)
        if self._may_hold(output) and sum(len(each.new_token_ids) for each in held) < _MAX_TOKENS:
            return None
        del self._held[output.request_id]
        return joined(held)

    def _may_hold(self, output: Any) -> bool:
        request = self.requests.get(output.request_id)  # None if it has ended
        params = None if request is None else request.sampling_params
        return (
            params is not None
            and params.output_kind == RequestOutputKind.FINAL_ONLY
            and not params.stop
            and all(getattr(output, name) is None for name in _NOT_HELD)
            and not any(event.type == EngineCoreEventType.PREEMPTED for event in output.events or ())
        )

    def _send_all(self, by_client: dict[int, Any]) -> None:
        held, self._held = self._held, {}
        for request_id, outputs in held.items():
            client = self.requests[request_id].client_index
            if client not in by_client:
                by_client[client] = EngineCoreOutputs(outputs=[])
            by_client[client].outputs.append(joined(outputs))


def joined(outputs: Sequence[Any]) -> Any:
    """Join the EngineCoreOutput objects of one request, from consecutive steps, into one."""
    if len(outputs) == 1:
        return outputs[0]
    events = [event for output in outputs for event in output.events or ()]
    return msgspec.structs.replace(
        outputs[-1],
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        new_logprobs=_joined_logprobs([output.new_logprobs for output in outputs if output.new_logprobs is not None]),
        events=events or None,
        prefill_stats=next((output.prefill_stats for output in outputs if output.prefill_stats is not None), None),
    )


def _joined_logprobs(pieces: Sequence[LogprobsLists]) -> LogprobsLists | None:
    if not pieces:
        return None
    return LogprobsLists(
        logprob_token_ids=np.concatenate([piece.logprob_token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        sampled_token_ranks=np.concatenate([piece.sampled_token_ranks for piece in pieces]),
    )
