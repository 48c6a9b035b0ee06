"""All our decoders of bytes from outside, with good messages to start from."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pydantic

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.reward_models import model_frames
from services.trainer.checkpoints.checkpoint import parse_state
from services.trainer.groups.ledger import Ledger
from shared import control
from shared.arrays import pack_ids, pack_logprobs
from shared.errors import HeadraceError, MessageError
from shared.lineage import LineageVersion
from shared.messages import (
    PlayedEnvironment,
    RewardOutcome,
    VersionSpan,
    decode_completed_group,
    decode_prompt_group,
    decode_scored_group,
    encode,
)
from shared.refusals import decode_refusals
from shared.registration import decode_registration
from shared.turns import (
    SampledTurn,
    TurnAnswer,
    TurnRefusal,
    TurnRequest,
    decode_turn_answer,
    decode_turn_requests,
    encode_turn_answers,
    encode_turn_requests,
)
from shared.user_code import task_kind
from shared.weights.weight_delta import Delta, Positions, Values, parse_delta
from shared.weights.weight_manifest import Manifest, describe_file, file_name
from tests.fuzz import invariants, msgpack_reader, mutations
from tests.groups import completed_group, prompt_group, rollout, row, scored_group

Refusal = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Decoder:
    """One decoder under test.

    Attributes:
        name: Name for reports.
        seeds: Good messages.
        decode: The decoder.
        refusal: The exception for all other messages.
        read: Converts an accepted message to dicts and lists, without the decoder; None if there is nothing to check.
        ask: Returns the violated invariants of the result of ``read``.
        make: Makes a bad message from the good ones.
        weight: Relative number of its cases.
    """

    name: str
    seeds: list[bytes]
    decode: Callable[[bytes], Any]
    refusal: Refusal
    read: Callable[[bytes], Any] | None
    ask: Callable[[Any], Iterator[str]]
    make: Callable[[list[bytes], random.Random], bytes]
    weight: int = 1


def _from_msgpack(seeds: list[bytes], chance: random.Random) -> bytes:
    return mutations.mutated(seeds, chance, decode=mutations.msgpack_tree, encode=msgspec.msgpack.encode)


def _from_json(seeds: list[bytes], chance: random.Random) -> bytes:
    return mutations.mutated(seeds, chance, decode=mutations.json_tree, encode=mutations.to_json)


def _from_packed_json(kind: Any) -> Callable[[list[bytes], random.Random], bytes]:
    """Return what makes bad messages of JSON whose packed arrays are base64. Changes are made in the arrays."""

    def decode(data: bytes) -> Any:
        return msgspec.to_builtins(msgspec.json.decode(data, type=kind), builtin_types=(bytes,))

    return partial(mutations.mutated, decode=decode, encode=msgspec.json.encode)


def _read_json(data: bytes) -> Any:
    """Read JSON in which names of unknown fields, which msgspec skips, need not be UTF-8."""
    return json.loads(data.decode(errors="replace"))


def _small_ledger(seeds: list[bytes], chance: random.Random) -> bytes:
    """Return a ledger whose groups fit into memory, or one with an impossible number of groups."""
    while True:
        data = _from_json(seeds, chance)
        numbers = [int(digits) for digits in _digits(data) if len(digits) < 20]
        if not any(10**5 < number <= 10**8 for number in numbers):
            return data


def _digits(data: bytes) -> list[str]:
    text = "".join(chr(byte) if 48 <= byte <= 57 else " " for byte in data)
    return text.split()


def _from_deltas(seeds: list[bytes], chance: random.Random) -> bytes:
    """Return a changed delta, usually with the checksum of its changed content."""
    import zlib

    changed = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    body = bytes(changed[:-4])[: chance.choice((None, None, chance.randrange(len(changed))))]
    return bytes(changed) if chance.random() < 0.2 else body + zlib.crc32(body).to_bytes(4, "little")


def _nothing(_: Any) -> Iterator[str]:
    return iter(())


def _delta(delta: Delta) -> Iterator[str]:
    if delta.item_bytes not in (1, 2, 4, 8) or not 0 <= delta.num_changed <= delta.num_elements:
        yield "the header contradicts itself"


def _version(text: bytes) -> Iterator[str]:
    first, _, second = text.decode().rpartition(":")
    if not 0 <= int(second) < 10**12 or not 0 <= int(first or 0) < 10**8:
        yield "the version cannot be"


def _groups() -> list[Decoder]:
    several = completed_group(num_generations=3)
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]}
    forked = msgspec.structs.replace(
        rollout(),
        rows=(row((5, 6, 7, 8, 9, 3, 10), (0, 0, 0, 1, 1, 0, 1)), row((5, 6, 7, 8, 9, 4, 10), (0, 0, 0, 0, 0, 0, 1))),
        completion=[call, {"role": "tool", "content": "42"}],
        tool_calls=2,
        tool_failures=1,
    )
    lost = msgspec.structs.replace(rollout(branch=2), rows=(), completion=[], lost="a tool hung")
    turns = msgspec.structs.replace(several, rollouts=(forked, rollout(branch=1, completion_ids=(8, 9, 10, 11)), lost))
    played = PlayedEnvironment(
        "my_envs:Game", True, " Guess.", 0.5, {"board": [1, {"a": None}]}, {"client": "TypeError: ..."}
    )
    ended = PlayedEnvironment("my_envs:Game", True)
    in_environments = msgspec.structs.replace(
        several,
        rollouts=(
            msgspec.structs.replace(several.rollouts[0], environment=played),
            msgspec.structs.replace(several.rollouts[1], environment=ended),
            msgspec.structs.replace(lost, environment=ended),
        ),
    )
    scored = scored_group()
    was_lost = RewardOutcome("exact", "lost", None, 1.0, "a tool hung")
    unscored = msgspec.structs.replace(
        scored,
        rollouts=(
            msgspec.structs.replace(forked, rewards=scored.rollouts[0].rewards),
            msgspec.structs.replace(lost, branch=1, rewards=(was_lost,)),
        ),
    )
    rich = msgspec.structs.replace(
        prompt_group(), prompt=[{"role": "user", "content": "6 * 7?"}],
        columns={"answer": 42, "nested": {"list": [1, 2.5, None, "x"], "map": {"a": b"bytes"}}},
    )  # fmt: skip
    return [
        Decoder("prompt group", [encode(prompt_group()), encode(rich)], decode_prompt_group, MessageError,
                msgpack_reader.read, invariants.prompt_group, _from_msgpack, 3),
        Decoder("completed group", [encode(several), encode(turns), encode(in_environments)],
                decode_completed_group, MessageError,
                msgpack_reader.read, invariants.completed_group, _from_msgpack, 8),
        Decoder("scored group",
                [encode(scored), encode(scored_group(rewards=(0.0, 0.5, 1.0))), encode(unscored)],
                decode_scored_group, MessageError, msgpack_reader.read, invariants.scored_group, _from_msgpack, 8),
    ]  # fmt: skip


def _bodies() -> list[Decoder]:
    of_run: dict[str, Any] = {"run_id": "run-a", "epoch": 1048577}
    probe = {"token_ids": [5, 6, 7], "logprobs": [-0.5, -0.25], "tolerance": 0.05, "timeout_s": 5.0}
    begin = of_run | {"policy_version": 3, "names": ["a", "b"], "dtype_names": ["float32", "float32"],
                      "shapes": [[4, 2], [8]], "timeout_s": 30.0}  # fmt: skip
    bodies: list[tuple[type[pydantic.BaseModel], list[dict[str, Any]]]] = [
        (control.ReplicaInfo, [{"replica_id": "g", "run_id": "run-a", "model": "m", "transports": ["gloo"],
                                "torch_version": "2", "nccl_version": None, "num_workers": 1, "dtype": "float32",
                                "epoch": 1, "policy_version": 3, "incarnation": 1, "is_held": False}]),
        (control.JoinRequest, [of_run | {"transport": "gloo", "master_address": "h", "master_port": 29500,
                                         "rank_offset": 1, "world_size": 2, "torch_version": "2", "nccl_version": None,
                                         "buffer_bytes": 1024, "timeout_s": 30.0}]),
        (control.BeginRequest, [begin, begin | {"encoding": "delta", "sizes": [5, 6], "base_checksum": "c"}]),
        (control.CommitRequest, [of_run | {"policy_version": 3, "timeout_s": 30.0, "checksum": "c", "probe": probe}]),
        (control.CommitReply, [{"replica_id": "g", "policy_version": 3, "receive_s": 0.5, "load_s": 0.25,
                                "standstill_s": 0.5, "probe_s": 0.1, "probe_max_diff": 0.01}]),
        (control.AbortRequest, [of_run | {"reason": "why"}]),
        (control.SleepRequest, [of_run]),
    ]  # fmt: skip
    return [
        Decoder(model.__name__, [json.dumps(body).encode() for body in good], model.model_validate_json,
                pydantic.ValidationError, json.loads, invariants.control_body, _from_json)
        for model, good in bodies
    ]  # fmt: skip


def _turns() -> list[Decoder]:
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]}
    asked = [{"role": "user", "content": "6 * 7?"}]
    first = TurnRequest("run-a", "00000007-1", asked, [{"type": "function"}], max_tokens=9, n=3)
    second = TurnRequest("run-a", "00000007-2", [*asked, call, {"role": "tool", "content": "42"}],
                         recorded_ids=pack_ids([5, 6, 7, 8]), num_recorded_messages=2, max_row_tokens=20)  # fmt: skip
    turn = SampledTurn(
        appended_ids=pack_ids([5, 6]), token_ids=pack_ids([7, 8, 9]), logprobs=pack_logprobs([-0.5, -0.25, -0.125]),
        version_spans=(VersionSpan(3, 0, 2, 1), VersionSpan(4, 2, 3, 1)), finish_reason="stop", message=call,
        started_at_s=5.0, ended_at_s=6.0,
    )  # fmt: skip
    answers = [TurnAnswer(0, turn=turn), TurnAnswer(1, refusal=TurnRefusal("context_length", "it is full"))]
    return [
        Decoder("turn requests", [encode_turn_requests([first]), encode_turn_requests([first, second])],
                decode_turn_requests, MessageError, _read_json, invariants.turn_requests,
                _from_packed_json(list[TurnRequest]), 4),
        Decoder("turn answer", [encode_turn_answers([answer]) for answer in answers], decode_turn_answer, MessageError,
                _read_json, invariants.turn_answer, _from_packed_json(TurnAnswer), 4),
    ]  # fmt: skip


def _manifest() -> Decoder:
    files = [describe_file(file_name(index, 2), b"x" * index) for index in range(2)]
    full = Manifest(run_id="run-a", policy_version=3, encoding="full", checksum="c", files=files)
    delta = full.model_copy(
        update={"encoding": "delta", "base": "00000001-00000001-v2", "base_checksum": "b", "files": files[:1]}
    )
    return Decoder("weight manifest", [full.model_dump_json().encode(), delta.model_dump_json().encode()],
                   Manifest.model_validate_json, pydantic.ValidationError, json.loads, invariants.weight_manifest,
                   _from_json, 2)  # fmt: skip


def _deltas() -> Decoder:
    seeds = [
        Delta(Positions.NONE, Values.WHOLE, 2, 4, 4, b"", b"12345678"),
        Delta(Positions.GAPS, Values.RAW, 2, 300, 2, b"\x01\xff\x02", b"1234"),
        Delta(Positions.BITMAP, Values.STEPS, 4, 8, 2, b"\x03", b"\x01\x80abcd"),
    ]
    return Decoder("weight delta", [delta.to_bytes() for delta in seeds], parse_delta, ValueError,
                   parse_delta, _delta, _from_deltas)  # fmt: skip


def _of_trainer() -> list[Decoder]:
    kept = Ledger(admitted=61)
    for number in (*range(20), 22, *range(30, 60)):
        kept.record_trained(number)
    kept.record_dropped(21, "stale")
    kept.record_dropped(25, "dead_letter")
    state = {"step": 10, "incarnation": 2, "extra": {"ledger": kept.to_json(), "num_tokens": 5, "considered_to": "1-2"}}
    return [
        Decoder("ledger", [json.dumps(kept.to_json()).encode()], lambda data: Ledger.from_json(json.loads(data)),
                (HeadraceError, ValueError, RecursionError), json.loads, invariants.ledger, _small_ledger, 2),
        Decoder("checkpoint state", [json.dumps(state).encode()],
                parse_state, ValueError, json.loads, invariants.checkpoint_state, _from_json),
    ]  # fmt: skip


def _frames() -> list[Decoder]:
    verdicts: list[dict[str, Any]] = [
        {"outcome": "scored", "value": 1.0, "components": {"a": 0.5}, "metrics": {"b": 1.0}, "extra": {"c": 0.5}},
        {"outcome": "error"},
    ]
    ours = [{"type": "Answer", "verdicts": verdicts}, {"type": "Started"}, {"type": "Refused", "detail": "why"}]
    models = [{"type": "Scored", "id": 3, "verdicts": verdicts}, {"type": "Working", "ids": [1, 2], "is_scoring": True},
              {"type": "Passed", "num_texts": 2, "num_tokens": 9, "num_padded_tokens": 12, "seconds": 0.5}]  # fmt: skip
    return [
        Decoder("worker reply", [msgspec.msgpack.encode(reply) for reply in ours],
                partial(task_kind.decode_reply, RewardTasks()), msgspec.DecodeError, msgpack_reader.read,
                invariants.worker_reply, _from_msgpack, 2),
        Decoder("model reply", [msgspec.msgpack.encode(reply) for reply in models], model_frames.decode_reply,
                msgspec.DecodeError, msgpack_reader.read, invariants.model_reply, _from_msgpack),
    ]  # fmt: skip


def _of_redis() -> list[Decoder]:
    refusal = {"kind": "generator", "replica_id": "g", "reason": "why", "at_s": 5.0}
    return [
        Decoder("registration", [b'{"url": "http://h:1", "doing": "loading"}'], decode_registration, (), None,
                _nothing, _from_json),
        Decoder("refusal", [json.dumps(refusal).encode()], lambda data: decode_refusals({"a": data}), (), None,
                _nothing, _from_json),
        Decoder("version", [b"2:40", b"7"], lambda data: LineageVersion.parse(data.decode()), ValueError,
                lambda data: data, _version,
                lambda seeds, chance: mutations.other_bytes(chance.choice(seeds), seeds, chance)),
    ]  # fmt: skip


def all_decoders() -> list[Decoder]:
    """Return every decoder."""
    return [*_groups(), *_bodies(), *_turns(), _manifest(), _deltas(), *_of_trainer(), *_frames(), *_of_redis()]
