"""Imports every module that a vLLM engine core needs on a CPU. Only the fork server (fork_server.py) imports it."""

import importlib

from services.generator.engine.spawned import end_with_parent
from shared.service.garbage import collected_later, freeze_long_lived_objects

# It has to find the name of the process in memory, before anything changes the variables beside it.
importlib.import_module("setproctitle").getproctitle()
# multiprocessing looks for the end of the service only after these imports, which take many seconds.
end_with_parent()
with collected_later():
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
freeze_long_lived_objects()  # a forked process whose collector marked them would copy their pages
