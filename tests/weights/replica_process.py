"""A generator replica reduced to its engine and the receiving end of the push; run as a process of its own.

Beside the weight routes it answers ``POST /probe``: sample, and say what was sampled under which version; and, if it
serves adapters, the OpenAI-compatible routes.
"""

import argparse
import asyncio
import os
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Probe(BaseModel):
    prompt_ids: list[int]
    max_tokens: int


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--lora-alpha", type=int, default=0)
    args = parser.parse_args()

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.generator.adapter import AdapterSpec, serving_request
    from services.generator.engine import Engine
    from services.generator.engine_spec import EngineSpec
    from services.generator.openai_routes import make_handlers
    from services.generator.vllm_plugin import GLOO_BACKEND
    from services.generator.weight_receiver import WeightReceiver
    from services.generator.weight_routes import make_router
    from shared.http_guard import KEEP_ALIVE_S, HttpGuard

    adapter = AdapterSpec(args.lora_rank, args.lora_alpha, None) if args.lora_rank else None
    engine_args: dict[str, Any] = {
        "model": args.model,
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": GLOO_BACKEND},
        **({} if adapter is None else adapter.engine_args()),
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
    receiver = WeightReceiver(replica_id=args.replica_id, grace_s=3.0)
    receiver.attach(engine, run_id=args.run_id, model=args.model, dtype="float32", adapter=adapter)
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
        async for output in engine.generate(prompt, parameters, f"probe-{count}", lora_request=lora_request):
            last = output
        choice = last.outputs[0]
        token_ids = list(choice.token_ids)
        return {
            "token_ids": token_ids,
            "logprobs": [step[token].logprob for step, token in zip(choice.logprobs, token_ids, strict=True)],
            "spans": [[span.version, span.start, span.end] for span in choice.weight_versions],
        }

    if adapter is not None:
        spec = EngineSpec(args.model, None, "float32", 256, GLOO_BACKEND, adapter)
        app.mount("/", await make_handlers(Engine(engine, spec)))

    async def end_when_stuck() -> None:
        await receiver.fatal.wait()
        os._exit(1)

    watch = asyncio.create_task(end_when_stuck(), name="end when stuck")
    guarded = HttpGuard(app, keys={"/": args.key})
    await uvicorn.Server(
        uvicorn.Config(guarded, host="127.0.0.1", port=args.port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)
    ).serve()
    watch.cancel()
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
