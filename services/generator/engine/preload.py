"""Imported only by the fork server (fork_server.py): everything that an engine core imports on a CPU."""

import importlib
import os

from services.generator.engine.vllm_environment import PARENT

# It has to find the name of the process in memory, before anything changes the variables beside it.
importlib.import_module("setproctitle").getproctitle()
for name in (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "services.generator.engine.engine_check",
    "services.generator.engine.engine_config",
    "services.generator.engine.engine_spec",
    "services.generator.engine.probe_scheduler",
    "services.generator.worker.worker_transfer",
):
    importlib.import_module(name)
os.environ[PARENT] = str(os.getpid())
