"""Computes the needs of an agent run's sessions service: replicas, recordings in Redis, processor time."""

import math

import msgspec
import numpy as np

from headrace.plan.pace import groups_per_second
from headrace.plan.rows import Row
from headrace.plan.workload import Workload
from services.sessions.recording.recorded import RecordedTurn
from shared.arrays import pack_ids, pack_logprobs
from shared.messages import VersionSpan
from shared.turns import SampledTurn

SESSIONS = "sessions"
GROUPS_OF_A_REPLICA = 64
"""The default of HEADRACE_MAX_INFLIGHT_GROUPS."""
_TEXT_BYTES_PER_TOKEN = 4
_TURNS = "give --turns: 1 + tools/call_frequency of a run, if a turn makes at most one call"
_TURN_CPU = (
    "give --turn-cpu-s: processor time of all replicas over headrace_session_turns_total, without the time of tools"
)


def recorded_bytes(*, num_generations: int, prompt_tokens: int, completion_tokens: int) -> int:
    """Return the bytes of the turns recorded in Redis for one group, if each of its rollouts has a single turn."""
    text, tokens = "x" * (_TEXT_BYTES_PER_TOKEN * completion_tokens), np.zeros(completion_tokens)
    turn = SampledTurn(
        appended_ids=pack_ids(np.zeros(prompt_tokens, dtype=np.int32)),
        token_ids=pack_ids(tokens.astype(np.int32)),
        logprobs=pack_logprobs(tokens.astype(np.float32)),
        version_spans=(VersionSpan(1000, 0, completion_tokens, 1),),
        finish_reason="stop",
        message={"role": "assistant", "content": text},
        started_at_s=1.5e9,
        ended_at_s=1.5e9,
    )
    prompt = {"role": "user", "content": "x" * (_TEXT_BYTES_PER_TOKEN * prompt_tokens)}
    entry = RecordedTurn(b"0" * 32, None, [prompt], b"0" * 32, False, 0, turn)
    return num_generations * len(msgspec.msgpack.encode(entry))


def session_rows(work: Workload) -> list[Row]:
    """Return the rows on the sessions service; empty if the run is not an agent run."""
    if not work.config.is_agentic:
        return []
    groups, generations = work.max_unsettled, work.config.num_generations
    replicas = math.ceil(groups / GROUPS_OF_A_REPLICA)
    at_most = (
        f"at least: groups in flight / {GROUPS_OF_A_REPLICA}, the most of a replica (HEADRACE_MAX_INFLIGHT_GROUPS)"
    )
    return [
        Row(SESSIONS, "sessions", groups * generations, "sessions", "at most: groups in flight x num_generations"),
        Row(SESSIONS, "replicas", replicas, "replicas", at_most),
        _recordings(work),
        *_processors(work),
    ]


def _recordings(work: Workload) -> Row:
    name = "recordings, about"
    if work.completion_tokens is None:
        return Row(SESSIONS, name, None, "bytes", "give --completion-tokens, or --from-run")
    one = recorded_bytes(
        num_generations=work.config.num_generations,
        prompt_tokens=math.ceil(work.prompt_tokens or 0),
        completion_tokens=math.ceil(work.completion_tokens),
    )
    how = "at most: groups in flight x what is recorded of one, with 4 bytes of text a token; a part of Redis's streams"
    return Row(SESSIONS, name, one * work.max_unsettled, "bytes", how)


def _processors(work: Workload) -> list[Row]:
    groups_per_s, turns, turn_cpu_s = groups_per_second(work), work.rates.turns, work.rates.turn_cpu_s
    if groups_per_s is None:
        return []
    if turns is None:
        return [Row(SESSIONS, "turns", None, "turns/s", _TURNS)]
    rate = groups_per_s * work.config.num_generations * turns
    rows = [Row(SESSIONS, "turns", rate, "turns/s", f"groups to score x num_generations x {turns:g}")]
    if turn_cpu_s is None:
        return [*rows, Row(SESSIONS, "processors", None, "cores", _TURN_CPU)]
    return [*rows, Row(SESSIONS, "processors", rate * turn_cpu_s, "cores", f"turns/s x {turn_cpu_s:g} s")]
