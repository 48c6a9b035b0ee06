"""Has vLLM check a run's engine arguments and sampling settings, in a separate process.

    POST /internal/v1/engine/check --run, HEADRACE_ENGINE_ARGS--> another process --verdict--> answer

vLLM checks options by building its config from them. This sets variables of the process, and may take long or never
end, so it happens in a separate process, started like an engine core, and with a deadline. The engine is not started.
Problems that only its start reveals, such as too little memory, are reported when the run is served.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from shared.engine_check import ENGINE_CHECK_PATH, EngineCheck, EngineProblem, EngineVerdict
from shared.errors import UnavailableError, UserError
from shared.files.file_roots import FileRoots
from shared.run_options.run_config import parse_run_config
from shared.run_options.run_places import misplaced
from shared.service.daemon_thread import in_thread
from shared.serving.http_guard import problem


class EngineChecker:
    """Has vLLM check the options of submitted runs, one run at a time.

    Args:
        of_replica: The engine arguments of HEADRACE_ENGINE_ARGS.
        timeout_s: How long a check may take, in seconds.
        data: Directories in which models of runs may be.
        weights: Directories to which the weights of runs may be written.
    """

    def __init__(self, of_replica: Mapping[str, Any], *, timeout_s: float, data: FileRoots, weights: FileRoots) -> None:
        self._of_replica = dict(of_replica)
        self._timeout_s = timeout_s
        self._places = {"data": data, "weights": weights}
        self._lock = asyncio.Lock()

    async def check(self, config: dict[str, Any]) -> EngineVerdict:
        """Return whether vLLM accepts a run's engine arguments and sampling settings, with errors and warnings.

        Raises:
            UnavailableError: vLLM gave no verdict, or not in time.
        """
        try:
            run = parse_run_config(config)
            outside = await in_thread(
                lambda: misplaced(run, **self._places, opens_data_sets=False), name="look at a run's places"
            )
        except UserError as error:
            outside = [(error.field or "vllm", str(error))]
        if outside:  # vLLM is not asked, because it would read these files
            return EngineVerdict(errors=[EngineProblem(field=field, message=message) for field, message in outside])
        async with self._lock:
            answer = await self._ask(config)
        try:
            return EngineVerdict.model_validate_json(answer)
        except ValidationError as error:
            raise UnavailableError("the check of the engine's options ended without an answer") from error

    async def _ask(self, config: dict[str, Any]) -> bytes:
        processes = multiprocessing.get_context("spawn")
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=_answer, args=(theirs, config, self._of_replica), name="engine check")
        try:
            await asyncio.to_thread(process.start)
            theirs.close()
            if not await asyncio.to_thread(ours.poll, self._timeout_s):
                raise UnavailableError(f"the check of the engine's options did not end within {self._timeout_s:.0f} s")
            return ours.recv_bytes()
        except EOFError:
            return b""
        finally:
            process.kill()
            await asyncio.to_thread(process.join)
            ours.close()


def make_check_router(checker: EngineChecker) -> APIRouter:
    """Return a router with ``POST /internal/v1/engine/check``: 200 with a verdict, or 503 if vLLM gave none.

    The route needs the internal key.
    """
    router = APIRouter(tags=["engine"])

    @router.post(ENGINE_CHECK_PATH, response_model=None)
    async def check(body: Annotated[EngineCheck, Body()]) -> EngineVerdict | JSONResponse:
        try:
            return await checker.check(body.config)
        except UnavailableError as error:
            answer = problem(503, "Not checked", f"{error}.")
            return JSONResponse(answer, status_code=503, media_type="application/problem+json")

    return router


def judge(config: Mapping[str, Any], of_replica: Mapping[str, Any]) -> EngineVerdict:
    """Build vLLM's config for a run in this process, and return the errors and warnings."""
    from vllm.platforms import current_platform

    from services.generator.engine.engine_config import check_sampling, make_vllm_config
    from services.generator.engine.engine_spec import spec_for
    from shared.run_options.run_config import RunConfig

    run = RunConfig.model_validate(config)
    has_cuda = bool(current_platform.is_cuda())
    try:
        spec = spec_for(run, has_cuda=has_cuda)
        vllm_config = make_vllm_config(spec, of_replica, has_cuda=has_cuda)
        check_sampling(run, vllm_config)
    except UserError as error:
        return EngineVerdict(errors=[EngineProblem(field=error.field or "vllm", message=str(error))])
    return EngineVerdict(
        warnings=[
            f"vllm.{name} is overridden by HEADRACE_ENGINE_ARGS of the generators, which set {of_replica[name]!r}"
            for name in spec.overruled(of_replica)
        ]
    )


def _answer(answers: Connection, config: Mapping[str, Any], of_replica: Mapping[str, Any]) -> None:
    """Main function of the checking process: send the verdict as JSON.

    vLLM's output is discarded, because log lines about a run that is not served would only confuse.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    answers.send_bytes(judge(config, of_replica).model_dump_json().encode())
