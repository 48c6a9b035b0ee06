"""No request body can occupy the event loop of a service for long: a table of hostile bodies, sent to real processes.

The test measures the processor time of the longest callback (loop_meter.py), which does not depend on other programs.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from shared.control import WEIGHTS_PATH
from tests.conftest import MEASURED
from tests.http.service_process import INTERNAL_KEY, KEY, ServiceProcess

_MOST_MS = 200.0
"""Twice the wanted limit, because the same work takes more processor time on a busy machine."""
_MIB = 1024 * 1024
_RUN = {"model": "/nowhere", "dataset_name": "/nowhere.jsonl", "reward_funcs": ["accuracy_reward"]}


def _fits(part: bytes, size: int, *, begin: bytes, end: bytes) -> bytes:
    return begin + part * ((size - len(begin) - len(end)) // len(part)) + end


def _run(**settings: Any) -> bytes:
    return json.dumps(_RUN | settings).encode()


def _score(num_rows: int = 1, **fields: Any) -> bytes:
    rows = {"reward_funcs": ["exact_match"], "prompts": ["p"] * num_rows, "completions": ["c"] * num_rows}
    return json.dumps(rows | fields).encode()


def _raw(size: int) -> dict[str, bytes]:
    """Return bodies that are hostile to any route."""
    return {
        "lists": _fits(b"[],", size, begin=b'{"x":[', end=b"[]]}"),
        "lists in lists": b"[" * (size // 2) + b"]" * (size // 2),
        "names": b"{" + b",".join(b'"%d":0' % n for n in range(size // 12)) + b"}",
        "texts": _fits(b'"",', size, begin=b'{"x":[', end=b'""]}'),
        "numbers": _fits(b"0,", size, begin=b'{"x":[', end=b"0]}"),
        "a number": _fits(b"9", size, begin=b'{"x":', end=b"}"),
        "an infinite number": b'{"x": 1e400, "y": NaN}',
        "quotes": _fits(b'\\"', size, begin=b'{"x":"', end=b'"}'),
        "brackets in text": _fits(b"[{:", size, begin=b'{"x":"', end=b'"}'),
        "a name": _fits(b"n", size, begin=b'{"', end=b'":1}'),
        "no JSON": b"[" + b" " * (size - 2),
    }


def _of_trainer() -> dict[str, bytes]:
    return _raw(_MIB - 100) | {
        "engine arguments": _run(vllm={f"k{n}": 1 for n in range(50_000)}),
        "engine arguments, long": _run(vllm={f"k{n}" + "x" * 55: 1 for n in range(150)}),
        "reward functions": _run(reward_funcs=[f"f{n}" for n in range(50_000)]),
        "a reward function": _run(reward_funcs=["f" * 1_000_000]),
        "a model": _run(model="m" * 1_000_000),
        "a data set": _run(dataset_name="d" * 1_000_000),
        "data sets": _run(datasets=[{"path": f"a/{n}"} for n in range(20_000)], dataset_name=None),
        "settings": _run(**{f"learning_rat{n}": 1 for n in range(190)}),
        "sampling options": _run(generation_kwargs={f"temperatur{n}": 1 for n in range(9_000)}),
        "weights": _run(reward_weights=["x"] * 200_000),
        "columns": _run(columns=["c"] * 150_000),
        "renamed": _run(rename_columns={f"k{n}": 1 for n in range(9_000)}),
        "stops": _run(generation_kwargs={"stop": ["s"] * 200_000}),
        "arguments": _run(reward_kwargs={"accuracy_reward": {"a": [0] * 300_000}}),
        "arguments of many": _run(reward_kwargs={f"f{n}": {} for n in range(9_000)}),
    }


def _of_rewarder() -> dict[str, bytes]:
    return _raw(8 * _MIB - 100) | {
        "functions": _score(reward_funcs=[f"f{n}" for n in range(50_000)]),
        "a function": _score(reward_funcs=["f" * 1_000_000]),
        "64 functions of 4096 texts": _score(
            4096, reward_funcs=["exact_match"] * 64, columns={"solution": ["c"] * 4096}
        ),
        "64 unknown functions": _score(reward_funcs=[f"exact_mach{n}" for n in range(64)]),
        "rows that are none": _score(prompts=[1] * 4096, completions=[1] * 4096),
        "messages": _score(4000, prompts=[[{"role": "u", "content": "c"}] * 6] * 4000),
        "token ids": _score(4000, completion_ids=[[123456] * 250] * 4000),
        "columns": _score(columns={f"k{n}": [0] for n in range(90_000)}),
        "a column": _score(columns={"k": [[0] * 3_000_000]}),
        "arguments": _score(reward_kwargs={"exact_match": {"a": [0] * 3_000_000}}),
        "arguments of many": _score(reward_kwargs={f"f{n}": {} for n in range(40_000)}),
        "a template's": _score(chat_template_kwargs={"k": [[0] * 3_000_000]}),
    }


def _of_generator() -> dict[str, bytes]:
    return _raw(8 * _MIB - 100) | {
        "shapes": json.dumps({"shapes": [["x"]] * 40_000}).encode(),
        "sizes": json.dumps({"sizes": ["x"] * 900_000}).encode(),
    }


def _of_sessions() -> dict[str, bytes]:
    return _raw(_MIB - 100) | {
        "too long": json.dumps({"tools": [f"m:f{n}" for n in range(400_000)]}).encode(),
        "tools": json.dumps({"tools": [f"m:f{n}" for n in range(70_000)]}).encode(),
        "a tool": json.dumps({"tools": ["t" * 1_000_000]}).encode(),
        "an agent": json.dumps({"agent": "a" * 1_000_000}).encode(),
        "MCP servers": json.dumps({"mcp_servers": [f"s{n}" for n in range(90_000)]}).encode(),
        "unknown options": json.dumps({f"tool{n}": 1 for n in range(900)}).encode(),
    }


_HOSTILE: dict[str, tuple[str, Callable[[], dict[str, bytes]]]] = {
    "trainer": ("/v1/runs?dry_run=true", _of_trainer),
    "rewarder": ("/v1/score", _of_rewarder),
    "generator": (f"{WEIGHTS_PATH}/begin", _of_generator),
    "sessions": ("/v1/tools/check", _of_sessions),
}
"""The route of each service, and what makes its bodies."""


def test_no_body_takes_the_event_loop_for_long(
    service: ServiceProcess, record_property: Callable[[str, object], None]
) -> None:
    path, bodies_of = _HOSTILE[service.kind]
    key = INTERNAL_KEY if service.kind == "generator" else KEY
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    found: dict[str, tuple[float, int, float]] = {}
    with httpx.Client(
        base_url=f"http://127.0.0.1:{service.port}", headers=headers, trust_env=False, timeout=120
    ) as client:
        client.post(path, content=b"{}")  # imports at the first request are not caused by a body
        for name, body in bodies_of().items():
            before, began_at = service.num_callbacks(), time.monotonic()
            reply = client.post(path, content=body)
            took_s = time.monotonic() - began_at
            assert client.get("/livez").is_success  # a callback that answers has ended by then
            found[name] = (service.longest_callback_ms(since=before), reply.status_code, took_s)
            assert len(reply.content) < 64 * 1024 or reply.is_success, f"{name}: {len(reply.content)} bytes of answer"
    for name, (ms, status, took_s) in sorted(found.items(), key=lambda item: -item[1][0]):
        record_property(MEASURED, f"{service.kind}: {name}: {ms:.0f} ms of the loop, {status} after {took_s:.2f} s")
    assert not {name for name, (_, status, _) in found.items() if status in (500, 503)}, found
    assert not {name: ms for name, (ms, _, _) in found.items() if ms > _MOST_MS}
