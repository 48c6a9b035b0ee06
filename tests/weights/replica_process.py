"""A generator replica with only its engine and the receiving end of the push; run as a separate process.

In addition to the weight routes and the OpenAI-compatible ones, it has ``POST /probe``: sample, and return the tokens
with their versions; ``POST /attach``: receive for the run with these options, without weights at first;
``POST /fault``: load weights wrong from now on (faulty_worker.py); and ``POST /hold-probes``: make probes wait.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Sequence
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Probe(BaseModel):
    prompt_ids: list[int]
    max_tokens: int


class Options(BaseModel):
    push_staging: Literal["memory", "none"]
    kv_after_push: Literal["recompute", "keep"]


class Fault(BaseModel):
    fault: str


class HoldProbes(BaseModel):
    is_held: bool


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--lora-alpha", type=int, default=0)
    parser.add_argument("--base", choices=["whole", "4-bit"], default="whole", help="of adapters")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine-args", type=json.loads, default={})
    args = parser.parse_args()

    from vllm import SamplingParams
    from vllm.platforms import current_platform

    from services.generator.engine.adapter import AdapterSpec, serving_request
    from services.generator.engine.engine import start_engine
    from services.generator.engine.engine_spec import EngineSpec
    from services.generator.engine.output_gate import GatedClient
    from services.generator.engine.receiving_engine import VllmReceivingEngine
    from services.generator.policy_api.openai_routes import make_handlers
    from services.generator.receive.weight_receiver import WeightReceiver
    from services.generator.receive.weight_routes import make_router
    from shared.access.door import Door
    from shared.access.keyring import Keyring
    from shared.access.route_table import GENERATOR, Route, RouteTable
    from shared.serving.http_guard import HttpGuard
    from shared.serving.http_limits import KEEP_ALIVE_S
    from tests.weights.faulty_worker import FAULTY_WORKER

    adapter = None
    if args.lora_rank:
        adapter = AdapterSpec(args.lora_rank, args.lora_alpha, None, is_base_4bit=args.base == "4-bit")
    spec = EngineSpec(args.model, None, args.dtype, 256, adapter)
    engine = await start_engine(
        spec,
        extra_args={"worker_extension_cls": FAULTY_WORKER} | args.engine_args,
        has_cuda=bool(current_platform.is_cuda()),
        timeout_s=220.0,
    )
    receiver = WeightReceiver(replica_id=args.replica_id, grace_s=3.0)
    receiving = VllmReceivingEngine(engine.client, adapter)
    receiver.attach(receiving, run_id=args.run_id, model=args.model, dtype=args.dtype)
    engine.client = client = GatedClient(engine.client, receiver.outputs)
    lora_request = serving_request(adapter)
    app = FastAPI()
    app.include_router(make_router(receiver))
    count = 0

    @app.post("/probe")
    async def probe(body: Probe) -> dict[str, Any]:
        nonlocal count
        count += 1
        parameters = SamplingParams(max_tokens=body.max_tokens, temperature=1.0, logprobs=0, ignore_eos=True)
        last: Any = None
        prompt: Any = {"prompt_token_ids": body.prompt_ids}
        async for output in client.generate(prompt, parameters, f"probe-{count}", lora_request=lora_request):
            last = output
        choice = last.outputs[0]
        token_ids = list(choice.token_ids)
        return {
            "token_ids": token_ids,
            "logprobs": [step[token].logprob for step, token in zip(choice.logprobs, token_ids, strict=True)],
            "spans": [[span.version, span.start, span.end] for span in choice.weight_versions],
        }

    @app.post("/attach")
    async def attach(body: Options) -> None:
        receiver.attach(receiving, run_id=args.run_id, model=args.model, dtype=args.dtype, **body.model_dump())

    @app.post("/fault")
    async def fault(body: Fault) -> None:
        await client.collective_rpc("set_fault", args=(body.fault,))

    probes_go_on = asyncio.Event()
    probes_go_on.set()
    is_at_probe = False
    submit_probe = receiving.submit_probe

    async def submit_when_told(token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        nonlocal is_at_probe
        is_at_probe = True
        await probes_go_on.wait()
        is_at_probe = False
        return await submit_probe(token_ids)

    receiving.submit_probe = submit_when_told  # type: ignore[method-assign]

    @app.post("/hold-probes")
    async def hold_probes(body: HoldProbes) -> None:
        (probes_go_on.clear if body.is_held else probes_go_on.set)()

    @app.get("/is-at-probe")
    async def at_probe() -> bool:
        return is_at_probe

    app.mount("/", await make_handlers(engine))

    async def end_when_stuck() -> None:
        await receiver.fatal.wait()
        os._exit(1)

    watch = asyncio.create_task(end_when_stuck(), name="end when stuck")
    ours = (
        ("POST", "/probe"),
        ("POST", "/attach"),
        ("POST", "/fault"),
        ("POST", "/hold-probes"),
        ("GET", "/is-at-probe"),
    )
    routes = RouteTable(
        *GENERATOR.routes, *(Route(path.strip("/"), method, path, "internal", query=None) for method, path in ours)
    )
    guarded = Door(HttpGuard(app), routes=routes, keyring=Keyring(api=args.key, internal=args.key))
    await uvicorn.Server(
        uvicorn.Config(guarded, host="127.0.0.1", port=args.port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)
    ).serve()
    watch.cancel()
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
