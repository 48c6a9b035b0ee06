"""Which sampled tokens the engine core holds, when it sends them, and that nothing of them is lost or relabelled."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
vllm_engine: Any = pytest.importorskip("vllm.v1.engine")
interface: Any = pytest.importorskip("vllm.v1.core.sched.interface")
outputs_of_runner: Any = pytest.importorskip("vllm.v1.outputs")
parameters: Any = pytest.importorskip("vllm.sampling_params")

PAUSED, UNPAUSED = interface.PauseState.PAUSED_ALL, interface.PauseState.UNPAUSED


class ToyScheduler:
    """Returns the outputs that a test gives it."""

    def __init__(self) -> None:
        self.pause_state = UNPAUSED
        self.requests: dict[str, Any] = {}
        self.has_others = False

    def add(self, request_id: str, *, client_index: int = 0, **params: Any) -> None:
        kinds: Any = parameters.RequestOutputKind
        sampling_params: Any = parameters.SamplingParams(**{"output_kind": kinds.FINAL_ONLY} | params)
        self.requests[request_id] = SimpleNamespace(
            request_id=request_id, client_index=client_index, sampling_params=sampling_params
        )

    def has_requests(self) -> bool:
        return self.has_others

    def finish_requests(self, request_ids: list[str]) -> list[Any]:
        return [self.requests.pop(request_id) for request_id in request_ids]

    def update_from_output(self, *outputs: Any) -> dict[int, Any]:
        by_client: dict[int, Any] = {}
        for output in outputs:
            client = self.requests[output.request_id].client_index
            by_client.setdefault(client, vllm_engine.EngineCoreOutputs(outputs=[])).outputs.append(output)
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return by_client


@pytest.fixture
def scheduler() -> Any:
    from services.generator.engine.held_outputs import HeldOutputs

    class Scheduler(HeldOutputs, ToyScheduler):
        pass

    return Scheduler()


def sampled(request_id: str, *tokens: int, **more: Any) -> Any:
    """Return an output with these tokens. The logprob of token t is -t."""
    ids = np.array(tokens, dtype=np.int32)
    logprobs = outputs_of_runner.LogprobsLists(ids[:, None], -ids[:, None].astype(np.float32), ids.astype(np.int64))
    return vllm_engine.EngineCoreOutput(
        request_id=request_id, new_token_ids=list(tokens), **{"new_logprobs": logprobs} | more
    )


def sent(by_client: dict[int, Any]) -> dict[str, list[int]]:
    return {output.request_id: output.new_token_ids for found in by_client.values() for output in found.outputs}


def test_tokens_are_held_until_the_request_ends_and_all_of_them_arrive(scheduler: Any) -> None:
    scheduler.add("a")
    assert sent(scheduler.update_from_output(sampled("a", 1, prefill_stats="how it began"))) == {}
    assert sent(scheduler.update_from_output(sampled("a", 2, 3))) == {}
    ended = scheduler.update_from_output(sampled("a", 4, finish_reason=vllm_engine.FinishReason.STOP))
    (output,) = ended[0].outputs
    assert output.new_token_ids == [1, 2, 3, 4]
    assert output.new_logprobs.logprobs.tolist() == [[-1.0], [-2.0], [-3.0], [-4.0]]
    assert output.new_logprobs.logprob_token_ids.tolist() == [[1], [2], [3], [4]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [1, 2, 3, 4]
    assert output.finish_reason == vllm_engine.FinishReason.STOP
    assert output.prefill_stats == "how it began"
    assert not scheduler.has_requests()


def test_a_long_completion_is_sent_in_pieces(scheduler: Any) -> None:
    scheduler.add("a")
    pieces = [sent(scheduler.update_from_output(sampled("a", token))).get("a", []) for token in range(70)]
    assert [len(piece) for piece in pieces if piece] == [32, 32]
    assert [token for piece in pieces for token in piece] == list(range(64))


def test_a_pause_is_not_complete_before_everything_held_is_sent(scheduler: Any) -> None:
    scheduler.add("a")
    scheduler.add("b", client_index=1)
    scheduler.update_from_output(sampled("a", 1), sampled("b", 2))
    assert not scheduler.has_requests()
    scheduler.pause_state = PAUSED
    assert scheduler.has_requests(), "otherwise the weights could change"
    found = scheduler.update_from_output()
    assert sent(found) == {"a": [1], "b": [2]}
    assert {client: [output.request_id for output in one.outputs] for client, one in found.items()} == {
        0: ["a"],
        1: ["b"],
    }
    assert not scheduler.has_requests()


def test_a_step_that_ends_in_a_pause_sends_its_own_tokens_too(scheduler: Any) -> None:
    scheduler.add("a")
    scheduler.update_from_output(sampled("a", 1))
    scheduler.pause_state = PAUSED
    assert sent(scheduler.update_from_output(sampled("a", 2))) == {"a": [1, 2]}


def test_what_was_sampled_for_an_aborted_request_is_forgotten(scheduler: Any) -> None:
    scheduler.add("a")
    scheduler.update_from_output(sampled("a", 1))
    scheduler.finish_requests(["a"])
    scheduler.pause_state = PAUSED
    assert not scheduler.has_requests()
    assert sent(scheduler.update_from_output()) == {}


@pytest.mark.parametrize(
    "params", [{"output_kind": parameters.RequestOutputKind.DELTA}, {"stop": ["x"], "detokenize": True}]
)
def test_readers_that_need_each_token_get_it_at_once(scheduler: Any, params: dict[str, Any]) -> None:
    scheduler.add("a", **params)
    assert sent(scheduler.update_from_output(sampled("a", 1))) == {"a": [1]}
    assert sent(scheduler.update_from_output(sampled("a", 2))) == {"a": [2]}


def test_an_output_with_more_than_tokens_is_sent_with_what_was_held(scheduler: Any) -> None:
    scheduler.add("a")
    scheduler.update_from_output(sampled("a", 1))
    assert sent(scheduler.update_from_output(sampled("a", 2, routed_experts=np.zeros(1)))) == {"a": [1, 2]}
