"""Imported by the fork server alone (fork_server.py): everything that an engine core imports on a CPU."""

import os

import setproctitle
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker

from services.generator.engine import engine_check, engine_config, engine_spec, probe_scheduler
from services.generator.engine.vllm_environment import PARENT
from services.generator.worker import worker_transfer

PRELOADED = (vllm, engine_check, engine_config, engine_spec, probe_scheduler, worker_transfer)

# It has to find the name of the process in memory, before vLLM changes the variables beside it.
setproctitle.getproctitle()
os.environ[PARENT] = str(os.getpid())
