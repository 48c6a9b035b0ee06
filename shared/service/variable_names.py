"""The names of all environment variables that headrace reads, to warn about mistyped ones.

Services on one machine often share one environment, which may also be that of a Compose stack. A variable that none of
them reads was meant for something else, or is a mistake that would go unnoticed.
"""

import logging
import re
from collections.abc import Iterable, Mapping

from shared.near_name import nearest

log = logging.getLogger(__name__)

PREFIX = "HEADRACE_"
SIMULATED = "HEADRACE_SIMULATED_"
"""Prefix of the simulated generator's variables. Only that generator knows their names."""
_OF_SERVICES = """
    ADVERTISE_URL AGENT_ORIGINS API_KEY API_KEYS_FILE API_KEY_FILE BWRAP CHECK_TIMEOUT_S CODE_UPLOADS_DIR
    COLLECTIVE_TIMEOUT_S DATASET_CHECK_TIMEOUT_S DATA_ROOTS DEFAULT_ENGINE_ARGS DRAIN_S ENGINE_ARGS
    ENGINE_CHECK_TIMEOUT_S ENGINE_HANG_TIMEOUT_S ENGINE_START_TIMEOUT_S ENVIRONMENT_ORIGINS FIRST_BACKOFF_S
    GPUS_PER_REPLICA GPU_CLAIMS_DIR HEARTBEAT_S HOST HUB_TIMEOUT_S IMPORT_TIMEOUT_S INTERNAL_KEY INTERNAL_KEY_FILE
    KEEP_ALIVE_S LAST_BACKOFF_S LOG_FORMAT LOG_LEVEL MAX_CONNECTIONS MAX_ENVIRONMENTS MAX_EVENT_STREAMS
    MAX_INFLIGHT_GROUPS MAX_INFLIGHT_REQUESTS MAX_OPEN_SESSIONS MAX_QUEUED_REQUESTS MAX_QUEUED_RUNS MAX_REQUESTS
    MAX_RESTARTS_WITHOUT_PROGRESS MAX_UPLOAD_BYTES MCP_CONFIG METRICS_PORT NUM_AGENT_WORKERS NUM_REWARD_WORKERS
    NUM_TOOL_WORKERS POLL_EVERY_S PORT PROGRESS_IS_STALE_AFTER_S PUSH_ADDRESS QUEUE_TIMEOUT_S RANK_COMMAND RANK_CPUS
    RANK_ENV RANK_EXIT_GRACE_S RANK_STOP_GRACE_S REDIS_PASSWORD_FILE REDIS_PATIENCE_S REDIS_URL RENDEZVOUS_ENDPOINT
    REPLICA_ID REQUEST_BODY_TIMEOUT_S REQUEST_HEAD_TIMEOUT_S REWARDER_URL REWARD_ALLOWED_HOSTS REWARD_ALLOWED_NETWORKS
    REWARD_ALLOWED_PORTS REWARD_CA_FILE REWARD_CHECK_TIMEOUT_S REWARD_LIMITS REWARD_MAX_ANSWER_BYTES REWARD_MODEL_DEVICE
    REWARD_MODEL_DTYPE REWARD_MODEL_LOAD_TIMEOUT_S REWARD_MODEL_MAX_BATCH_TOKENS REWARD_MODEL_MAX_LOADED REWARD_MODULES
    REWARD_PATH REWARD_RELOAD_EVERY_S REWARD_SECRETS_DIR RUNS_DIR SANDBOX SANDBOX_IMAGE SANDBOX_PYTHON SEND_TIMEOUT_S
    SESSIONS_URL SUPERVISE_EVERY_S TLS_CA_FILE TLS_CERT_FILE TLS_GENERATOR_NAME TLS_KEY_FILE TOOL_CHECK_TIMEOUT_S
    TOOL_MODULES TOOL_PATH UPLOADS_DIR UPLOADS_KEEP_FREE_BYTES UPLOAD_EXPIRY_S WEIGHT_ROOTS WORKER_MEMORY_MIB
    WORKER_OPEN_FILES
"""
SETTINGS = frozenset(_OF_SERVICES.split())
"""Variables of the services, without the prefix."""
OTHERS = frozenset({"URL", "STATE_DIR", "INPUTS_DIR", "LAUNCHER_PID", "PARENT_PID", "ENGINE_FAILURE_FILE"})
"""Variables of the command line, and variables that processes set for their children."""
_OF_DEPLOYMENT = """
    API_KEYS TLS BUILD_NETWORK CGROUP_DIR CODE CPU_GENERATOR_CPUS CPU_GENERATOR_MEMORY CPU_KVCACHE_GIB CPU_TRAINER_CPUS
    CPU_TRAINER_MEMORY CPU_TRAINER_THREADS DATA GENERATORS GENERATOR_GPUS GENERATOR_MEMORY GPU_RUNTIME GRAFANA_IMAGE
    GRAFANA_PORT HUB METRICS_KEPT MODELS PROMETHEUS_IMAGE PUBLISHED_PORT PYTHON_IMAGE REDIS REDIS_DIR REDIS_IMAGE
    REDIS_MAXMEMORY REDIS_MEMORY REDIS_USERS REGISTRY REVISION REWARDER_FLAVOUR REWARDER_GPUS REWARDER_HUB
    REWARDER_MEMORY REWARDER_RUNTIME REWARDER_TARGET REWARDS REWARD_SECRETS RUNS SECRETS SECRETS_DIR
    SESSIONS_ADVERTISE_URL SESSIONS_MEMORY SHM_SIZE TMP_SIZE TOOLS TRAINER_GPUS TRAINER_MEMORY UPLOADS VERSION
    VLLM_IMAGE WEIGHTS
"""
DEPLOYMENT = frozenset(_OF_DEPLOYMENT.split())
"""Variables of deploy/.env.example and the files beside it. No service reads them, so none is suggested to a user."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)|$)")
"""Variables that Kubernetes sets in each pod for Services called headrace-..., unless enableServiceLinks is false."""


def warn_of_unknown_variables(environment: Mapping[str, str], *, simulated: Iterable[str] = ()) -> None:
    """Warn about HEADRACE_ variables that no service reads, each with the most similar known name; log no values.

    Args:
        environment: This process's environment.
        simulated: Settings of the simulated generator. If none are given, all variables with its prefix are accepted.
    """
    of_simulated = [f"{SIMULATED}{name.upper()}".removeprefix(PREFIX) for name in simulated]
    known = [*sorted(SETTINGS | OTHERS), *of_simulated]
    for name, value in sorted(environment.items()):
        own = name.removeprefix(PREFIX)
        if own in (name, *known, *DEPLOYMENT) or (name.startswith(SIMULATED) and not of_simulated):
            continue
        if _SERVICE_LINK.search(name) and (not name.endswith("_PORT") or "://" in value):
            continue
        near = nearest(own, known)  # without the prefix, which would make all names similar
        hint = f"; did you mean {PREFIX}{near}?" if near else ""
        log.warning("%s is ignored: no service of headrace reads it%s", name, hint)
