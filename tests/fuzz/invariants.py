"""Invariants of accepted messages, checked on their bytes by code that is independent of the decoders.

Each function takes a message as plain dicts and lists, and returns the violated invariants. It uses no numpy, no struct
of ours, and no constant of the code under test.
"""

import base64
import datetime
import math
import re
import struct
from collections.abc import Iterator
from typing import Any

from tests.fuzz.mutations import is_list, is_table

_MOST_GROUPS = 10**6
"""Limit for the ledgers here; decoders.py makes no larger ones."""
_OUTCOMES = {"scored", "not_applicable", "timeout", "invalid", "overload", "error"}
_REFUSALS = {
    "context_length", "chat_template", "malformed", "sampling", "another_run", "unavailable", "failed",
}  # fmt: skip
_SCHEMA = 2


def prompt_group(group: Any) -> Iterator[str]:
    """Check a prompt group."""
    if group["type"] != "prompt_group" or group.get("schema_version", _SCHEMA) != _SCHEMA:
        yield "it is of another kind or release"
    yield from _prompt(group)
    yield from _stamps(group)


def completed_group(group: Any) -> Iterator[str]:
    """Check a completed group."""
    if group["type"] != "completed_group" or group.get("schema_version", _SCHEMA) != _SCHEMA:
        yield "it is of another kind or release"
    yield from _whole(group)
    for rollout in group["rollouts"]:
        if rollout.get("rewards"):
            yield "it is scored"


def scored_group(group: Any) -> Iterator[str]:
    """Check a scored group."""
    if group["type"] != "scored_group" or group.get("schema_version", _SCHEMA) != _SCHEMA:
        yield "it is of another kind or release"
    yield from _whole(group)
    functions = [[(reward["name"], reward["weight"]) for reward in rollout["rewards"]] for rollout in group["rollouts"]]
    if not functions[0] or any(each != functions[0] for each in functions):
        yield "rollouts have no, or other, reward functions"
    for rollout, reward in ((each, reward) for each in group["rollouts"] for reward in each["rewards"]):
        if (reward["outcome"] == "lost") != bool(rollout.get("lost")):
            yield "a rollout is lost, or its outcome, but not both"
        if reward["outcome"] != "lost":
            yield from outcome(reward)
        elif reward.get("value") is not None:
            yield "a lost rollout has a value"
        if not math.isfinite(reward["weight"]) or not 0 <= reward.get("latency_s", 0.0) <= 1e11:
            yield "a weight or a latency is not a number"
        if not reward["name"]:
            yield "a reward function has no name"


def outcome(verdict: Any) -> Iterator[str]:
    """Check the outcome of one function for one completion."""
    if verdict["outcome"] not in _OUTCOMES:
        yield "no such outcome"
    value = verdict.get("value")
    if (verdict["outcome"] == "scored") != (value is not None) or (value is not None and not math.isfinite(value)):
        yield f"{verdict['outcome']} with value {value}"
    yield from _beside_the_value(verdict)


def _beside_the_value(verdict: Any) -> Iterator[str]:
    """Check the numbers that a function reports or logs."""
    for kind in ("components", "metrics", "extra"):
        if not all(isinstance(part, str) or math.isfinite(part) for part in verdict.get(kind, {}).values()):
            yield f"a number among its {kind} is not one"


def _whole(group: Any) -> Iterator[str]:
    prompt, rollouts = group["prompt"], group["rollouts"]
    yield from _prompt(prompt)
    yield from _stamps(prompt)
    yield from _stamps(group)
    if len(rollouts) != prompt["num_generations"]:
        yield "it is not whole"
    if sorted(rollout["branch"] for rollout in rollouts) != list(range(len(rollouts))):
        yield "a branch is missing, or there twice"
    if len({rollout["rollout_id"] for rollout in rollouts}) != len(rollouts):
        yield "two rollouts have one id"
    found: list[Any] = [rollout.get("environment") or {} for rollout in rollouts]
    if len({(environment.get("name"), environment.get("has_reward")) for environment in found}) > 1:
        yield "environments of different types"
    for rollout in rollouts:
        yield from _rollout(rollout, prompt)


def _prompt(prompt: Any) -> Iterator[str]:
    if not 1 <= prompt["num_generations"] <= 1024:
        yield "num_generations cannot be"
    if not re.fullmatch("[0-9A-Za-z][0-9A-Za-z._-]*", prompt["group_id"]) or not prompt["run_id"]:
        yield "the group's id is invalid"
    if min(_numbers("<i", prompt["prompt_ids"]), default=0) < 0:
        yield "a prompt id is negative"
    yield from (f"a column has {what}" for what in _not_data(prompt["columns"], depth=0))


def _stamps(group: Any) -> Iterator[str]:
    if not all(0 <= stamp[1] <= 1e11 for stamp in group.get("stamps", ())):
        yield "a stamp has no time"


def _rollout(rollout: Any, prompt: Any) -> Iterator[str]:
    if rollout["group_id"] != prompt["group_id"]:
        yield "a rollout is of another group"
    if not rollout["rows"] and not rollout.get("lost"):
        yield "a rollout has no row, and is not lost"
    if not 0 <= rollout.get("tool_failures", 0) <= rollout.get("tool_calls", 0):
        yield "more tool calls failed than there were"
    yield from (f"a completion has {what}" for what in _not_data(rollout["completion"], depth=0))
    environment: Any = rollout.get("environment") or {}
    reward: Any = environment.get("reward")
    if reward is not None and (rollout.get("lost") or not environment["has_reward"] or not math.isfinite(reward)):
        yield "a reward of an environment that gives none"
    yield from (f"an attribute has {what}" for what in _not_data(environment.get("attributes", {}), depth=0))
    for row in rollout["rows"]:
        yield from _row(row, prompt)


def _row(row: Any, prompt: Any) -> Iterator[str]:
    ids = _numbers("<i", row["token_ids"])
    mask = list(row["loss_mask"])
    logprobs = _numbers("<f", row["logprobs"])
    num_sampled = mask.count(1)
    prompt_ids = _numbers("<i", prompt["prompt_ids"])
    if min(ids) < 0 or len(ids) != len(mask) or set(mask) - {0, 1}:
        yield "token ids and mask contradict each other"
    if ids[: len(prompt_ids)] != prompt_ids or any(mask[: max(len(prompt_ids), 1)]) or not num_sampled:
        yield "it does not begin with the prompt, or samples nothing after it"
    if len(logprobs) != num_sampled or all(map(math.isnan, logprobs)):
        yield "logprobs are missing"
    if any(logprob > 0.0011 or logprob == -math.inf for logprob in logprobs):
        yield "a logprob is no logprob"
    yield from _tiling(row["version_spans"], num_sampled, within=len(ids))
    held: list[int] = []
    for turn in row["turns"]:
        held += _places(turn["start"], turn["end"], len(ids))
        if (
            not 0 <= turn["start"] < turn["end"] <= len(ids)
            or not 0 <= turn["started_at_s"] <= 1e11
            or not 0 <= turn["ended_at_s"] <= 1e11
        ):
            yield "a turn is empty, or has no time"
    if held != sorted(set(held)) or (held and (held[0] < 0 or held[-1] >= len(ids))):
        yield "turns overlap, or lie outside the tokens"
    if {place for place, sampled in enumerate(mask) if sampled} - set(held):
        yield "a sampled token is in no turn"


def _tiling(spans: Any, num_sampled: int, *, within: int) -> Iterator[str]:
    tiled: list[int] = []
    for span in spans:
        tiled += _places(span[1], span[2], within)
        if not 0 <= span[0] < 10**12 or not 0 <= (span[3] if len(span) > 3 else 0) < 10**8 or span[2] <= span[1]:
            yield "a version span cannot be"
    if tiled != list(range(num_sampled)):
        yield "version spans do not tile the sampled tokens"


def _places(start: int, end: int, count: int) -> range:
    """Return the places from start to end, of at most ``count``: the requested range may be larger than memory."""
    return range(max(start, 0), min(end, count + 1))


def _numbers(form: str, packed: bytes) -> list[Any]:
    return [number for (number,) in struct.iter_unpack(form, packed)]


def _not_data(value: Any, *, depth: int) -> Iterator[str]:
    if depth > 40:
        yield "no end"
    elif is_table(value):
        for key, inside in value.items():
            if not isinstance(key, str):
                yield "a key that is no text"
            yield from _not_data(inside, depth=depth + 1)
    elif is_list(value):
        for inside in value:
            yield from _not_data(inside, depth=depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str | bytes | datetime.datetime)):
        yield "what is no data"


def turn_requests(requests: Any) -> Iterator[str]:
    """Check the body of a request for turns."""
    if len({request["run_id"] for request in requests}) != 1:
        yield "there is no request, or they are of several runs"
    for request in requests:
        messages, num_recorded = request["messages"], request.get("num_recorded_messages", 0)
        ids = _numbers("<i", base64.b64decode(request.get("recorded_ids", "")))
        if not request["run_id"] or not request["request_id"]:
            yield "it has no name"
        if not messages or not all(map(is_table, messages)) or not 0 <= num_recorded <= len(messages):
            yield "messages are missing"
        elif num_recorded and messages[num_recorded - 1].get("role") != "assistant":
            yield "the last recorded message was not sampled"
        if bool(ids) != bool(num_recorded) or min(ids, default=0) < 0:
            yield "recorded ids and messages contradict each other"
        if not 1 <= request.get("n", 1) <= 1024 or min(request.get(f"max_{of}tokens", 0) for of in ("", "row_")) < 0:
            yield "a limit cannot be"


def turn_answer(answer: Any) -> Iterator[str]:
    """Check one line of the answer."""
    turn, refusal = answer.get("turn"), answer.get("refusal")
    if (turn is None) == (refusal is None) or answer["index"] < 0:
        yield "it is no answer to any request"
    if refusal is not None and refusal["kind"] not in _REFUSALS:
        yield "no such refusal"
    if turn is None:
        return
    appended, ids = (_numbers("<i", base64.b64decode(turn[name])) for name in ("appended_ids", "token_ids"))
    if not ids or min(appended + ids) < 0 or len(_numbers("<f", base64.b64decode(turn["logprobs"]))) != len(ids):
        yield "token ids and logprobs contradict each other"
    if not 0 <= turn["started_at_s"] <= 1e11 or not 0 <= turn["ended_at_s"] <= 1e11:
        yield "it has no time"
    yield from _tiling(turn["version_spans"], len(ids), within=len(ids))


def control_body(body: Any) -> Iterator[str]:
    """Check any body of the weight push. Field names have the same meaning in all of them."""
    for name, value in body.items():
        if value is None:
            continue
        if name.endswith("_s") and not 0 <= value <= 1e9:
            yield f"{name} is not a time"
        elif name == "timeout_s" and value == 0:
            yield "a deadline is over before it began"
        elif name == "epoch" and not 0 <= value < 2**63:
            yield "the epoch cannot be"
        elif name == "policy_version" and not -1 <= value < 10**12:
            yield "the policy version cannot be"
        elif name == "incarnation" and not 0 <= value < 10**8:
            yield "the incarnation cannot be"
        elif name in ("num_workers", "world_size", "rank_offset") and not 0 <= value <= 2**20:
            yield f"{name} cannot be"
        elif name == "buffer_bytes" and not 1 <= value <= 2**53:
            yield "the buffer has no size"
        elif name == "probe_max_diff" and not 0 <= value < math.inf:
            yield "a difference is negative or not a number"
    if "policy_version" in body and "replica_id" not in body and body["policy_version"] < 0:
        yield "the version to be loaded is negative"
    if "world_size" in body and not 1 <= body["rank_offset"] < body["world_size"]:
        yield "a rank is outside the world"
    if "names" in body:
        yield from _parameters(body)
    probe = body.get("probe")
    if probe is not None:
        if min(probe["token_ids"]) < 0 or max(probe["token_ids"]) >= 2**31:
            yield "the probe has no tokens"
        if len(probe["logprobs"]) != len(probe["token_ids"]) - 1 or not all(
            -math.inf < logprob <= 0.0011 for logprob in probe["logprobs"]
        ):
            yield "the probe has no logprobs"
        if not 0 < probe["tolerance"] < math.inf or not 0 < probe["timeout_s"] <= 1e9:
            yield "the probe tolerates nothing, or has no time"


def _parameters(body: Any) -> Iterator[str]:
    if not len(body["names"]) == len(set(body["names"])) == len(body["shapes"]) == len(body["dtype_names"]) > 0:
        yield "names, shapes and dtypes contradict each other"
    if any(side < 0 for shape in body["shapes"] for side in shape):
        yield "a side is negative"
    if any(math.prod(shape) > 2**53 for shape in body["shapes"]):
        yield "a parameter is larger than any machine"
    if body.get("sizes") is not None and (len(body["sizes"]) != len(body["names"]) or min(body["sizes"]) < 0):
        yield "sizes contradict the names"


def weight_manifest(body: Any) -> Iterator[str]:
    """Check the manifest of a version of the weights."""
    if not 0 <= body["policy_version"] < 10**12:
        yield "the policy version cannot be"
    names = [file["name"] for file in body["files"]]
    if len(set(names)) != len(names) or any("/" in name or not name.endswith(".safetensors") for name in names):
        yield "a file is there twice, or elsewhere"
    if not all(0 <= file["num_bytes"] <= 2**53 for file in body["files"]):
        yield "a file has no size"
    is_delta = body["encoding"] == "delta"
    if is_delta != (body.get("base") is not None and body.get("base_checksum") is not None):
        yield "a delta has no base"


def ledger(kept: Any) -> Iterator[str]:
    """Check a ledger in a checkpoint."""
    settled: list[int] = []
    for runs in (kept["trained"], *kept["dropped"].values()):
        for first, last in runs:
            if not 0 <= first <= last < kept["admitted"] <= _MOST_GROUPS:
                yield "a run of groups is backwards, or of groups that were never admitted"
            settled += range(max(first, 0), min(last + 1, _MOST_GROUPS))
    if len(set(settled)) != len(settled):
        yield "a group has two outcomes"


def checkpoint_state(state: Any) -> Iterator[str]:
    """Check a checkpoint's own numbers."""
    if not 0 <= state["step"] < 10**12 or not 0 <= state.get("incarnation", 0) < 10**8:
        yield "its step or incarnation cannot be"


def worker_reply(reply: Any) -> Iterator[str]:
    """Check a reply of a reward worker."""
    for verdict in reply.get("verdicts", ()):
        if verdict["outcome"] not in _OUTCOMES:
            yield "no such outcome"
        if verdict.get("value") is not None and not math.isfinite(verdict["value"]):
            yield "a value is not a number"
        yield from _beside_the_value(verdict)


def model_reply(reply: Any) -> Iterator[str]:
    """Check a reply of a reward model's process."""
    yield from worker_reply(reply)
    for name in ("id", "num_texts", "num_tokens", "num_padded_tokens", "seconds"):
        if not 0 <= reply.get(name, 0) < math.inf:
            yield f"{name} is negative or not a number"
    if any(number < 0 for number in reply.get("ids", ())):
        yield "an id is negative"
