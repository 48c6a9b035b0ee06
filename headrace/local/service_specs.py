"""Makes the commands and environments of the processes that `headrace up` starts.

    redis --> trainer (run API; spawns ranks)   rewarder   sessions   generator-0 .. generator-(N-1)
                                                                      or one process of N simulated generators

Services are configured by environment variables. Keys and the Redis password are inherited as open files in memory
instead, because command lines are public and every process of the same user can read an environment.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.local import cpu_placement, embedded_redis, gpu_placement, redis_repair
from headrace.local.hang_watch import PING, Question
from headrace.local.held_port import HeldPort
from headrace.local.launch_ports import Doors, LaunchPorts
from headrace.local.state_dir import Keys, StateDir
from headrace.local.supervised_process import ServiceSpec
from shared.service.child_secrets import SECRETS
from shared.service.secret_files import password_of, without_password

_INTERNAL_KEY_FILE = "HEADRACE_INTERNAL_KEY_FILE"
_RANK_STOP_GRACE = "HEADRACE_RANK_STOP_GRACE_S"
_STOP_TIMEOUT_S = 15.0
_OTHERS_END_S = 45.0
"""Time for the services that end after the trainer, and for Redis."""
_TORCHRUN_VARIABLES = frozenset(
    f"{prefix}{name}" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that torchrun sets for its processes, besides TORCHELASTIC_*."""
REDIS, TRAINER, REWARDER, SESSIONS, SIMULATED = "redis", "trainer", "rewarder", "sessions", "simulated"


def default_commands() -> dict[str, tuple[str, ...]]:
    """Return the command line that starts each kind of service, by the kind's name."""
    modules = {
        TRAINER: "trainer",
        REWARDER: "rewarder",
        SESSIONS: "sessions",
        "generator": "generator",
        SIMULATED: "generator.simulated",
    }
    return {name: (sys.executable, "-m", f"services.{module}") for name, module in modules.items()}


@dataclass(frozen=True)
class UpSettings:
    """The options of `headrace up`.

    Attributes:
        num_simulated: Number of simulated generators, which run in one process and replace all real ones; 0 for none.
        metrics_port: First of consecutive ports, for trainer, rewarder, sessions service, generators; 0: no metrics.
        scheme: ``https`` if HEADRACE_TLS_CERT_FILE is set, which the services read themselves; else ``http``.
        ca_file: File with the CA of the services' certificate.
    """

    state_dir: Path
    num_generators: int = 1
    num_simulated: int = 0
    api_port: int | None = None
    metrics_port: int = 0
    redis_url: str | None = field(default=None, repr=False)
    repairs_redis: bool = False
    scheme: str = "http"
    ca_file: Path | None = None
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=default_commands)

    @property
    def num_generator_processes(self) -> int:
        """The number of generator processes. Simulated generators share a single one."""
        return 1 if self.num_simulated else self.num_generators


def trainer_stop_timeout_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds that the trainer has to end: 15 plus HEADRACE_RANK_STOP_GRACE_S for its ranks, at least 30."""
    try:
        rank_s = float(environment.get(_RANK_STOP_GRACE, _STOP_TIMEOUT_S))
    except ValueError:  # the trainer refuses it
        rank_s = _STOP_TIMEOUT_S
    return max(rank_s, _STOP_TIMEOUT_S) + _STOP_TIMEOUT_S


def end_patience_s() -> float:
    """Return the seconds that a `headrace up` in this environment has to end all services."""
    return trainer_stop_timeout_s() + _OTHERS_END_S


def redis_spec(state: StateDir, *, port: HeldPort, password: str) -> ServiceSpec:
    """Write the embedded server's configuration file, and return its spec. The server binds its port by itself."""
    port.let_bind()
    config = embedded_redis.write_config(state.redis, port=port.number, password=password)
    return ServiceSpec(
        name=REDIS,
        command=(str(embedded_redis.server_binary()), str(config)),
        environment=dict(os.environ),
        log_path=state.logs / "redis.log",
        is_essential=True,
        stop_timeout_s=_STOP_TIMEOUT_S,
        question=Question(port.number, PING),
        why_hopeless=lambda last_words: redis_repair.why_unreadable(state.redis, last_words=last_words),
    )


def service_specs(
    settings: UpSettings, state: StateDir, *, keys: Keys, ports: LaunchPorts, redis_url: str
) -> list[ServiceSpec]:
    """Return the specs (command, environment, ports) of the trainer, generators, rewarder and sessions service."""
    common = _common_environment(state, redis_url)
    secrets = _secrets(keys, redis_url)
    # The rewarder does not get the internal key: requests between it and other services carry the API key.
    for_rewarder = {name: secret for name, secret in secrets.items() if name != _INTERNAL_KEY_FILE}
    _, for_trainer = placement(settings, settings.num_generator_processes)
    trainer_environment = {
        "HEADRACE_REPLICA_ID": "trainer-0",
        "HEADRACE_RUNS_DIR": str(state.runs),
        "HEADRACE_REWARDER_URL": ports.rewarder.url,
        "HEADRACE_SESSIONS_URL": ports.sessions.url,
        **for_trainer,
    }
    if cpu_placement.num_unused_gpus(os.environ):
        trainer_environment[gpu_placement.VISIBLE] = ""  # it would start a rank for each GPU

    def spec(
        name: str,
        kind: str,
        doors: Doors,
        environment: Mapping[str, str],
        stop_timeout_s: float = _STOP_TIMEOUT_S,
        *arguments: str,
    ) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            command=(*settings.commands[kind], *arguments),
            environment={**common, **doors.environment, **environment},
            secrets=for_rewarder if kind == REWARDER else secrets,
            listeners=doors.listeners,
            log_path=state.logs / f"{name}.log",
            is_essential=kind == TRAINER,
            stop_timeout_s=stop_timeout_s,
            question=doors.question,
        )

    if settings.num_simulated:
        (doors,) = ports.generators
        how_many = ("--replicas", str(settings.num_simulated))
        generators = [spec(SIMULATED, SIMULATED, doors, {"HEADRACE_REPLICA_ID": SIMULATED}, _STOP_TIMEOUT_S, *how_many)]
    else:
        num_generators = len(ports.generators)
        generators = [
            generator_spec(
                settings, state, keys=keys, redis_url=redis_url, index=index, doors=doors, num_generators=num_generators
            )
            for index, doors in enumerate(ports.generators)
        ]
    return [
        spec(TRAINER, TRAINER, ports.trainer, trainer_environment, trainer_stop_timeout_s()),
        *generators,
        spec(REWARDER, REWARDER, ports.rewarder, {"HEADRACE_REPLICA_ID": "rewarder-0"}),
        spec(SESSIONS, SESSIONS, ports.sessions, {"HEADRACE_REPLICA_ID": "sessions-0"}),
    ]


def generator_spec(
    settings: UpSettings,
    state: StateDir,
    *,
    keys: Keys,
    redis_url: str,
    index: int,
    doors: Doors,
    num_generators: int,
) -> ServiceSpec:
    """Return the spec of generator ``index`` (from 0) of ``num_generators``, with its share of the GPUs or cores."""
    for_generators, _ = placement(settings, num_generators)
    name = f"generator-{index}"
    own = {**doors.environment, "HEADRACE_REPLICA_ID": name, **for_generators[index]}
    return ServiceSpec(
        name=name,
        command=settings.commands["generator"],
        environment={**_common_environment(state, redis_url), **own},
        secrets=_secrets(keys, redis_url),
        listeners=doors.listeners,
        log_path=state.logs / f"{name}.log",
        is_essential=False,
        stop_timeout_s=_STOP_TIMEOUT_S,
        question=doors.question,
    )


def placement(settings: UpSettings, num_generators: int) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the environment variables that give each generator, and the trainer, its GPUs or cores.

    Raises:
        UserError: There are too few GPUs.
    """
    if not cpu_placement.has_gpu(os.environ):
        generators, trainer = cpu_placement.place(cpu_placement.available_cores(), num_generators=num_generators)
        return [_unless_set(variables) for variables in generators], _unless_set(trainer)
    if settings.num_simulated:
        return [{}], {}
    gpus, at_start = gpu_placement.visible_gpus(os.environ), settings.num_generators
    return gpu_placement.place(gpus, os.environ, num_at_start=at_start, num_generators=num_generators)


def importable_environment() -> dict[str, str]:
    """Return this process's environment, changed so that a Python subprocess imports our packages."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        **os.environ,
        # Our packages have generic names: a folder `services` in the user's working directory must not hide ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": _joined_path(root, os.environ.get("PYTHONPATH")),
        "PYTHONUNBUFFERED": "1",
    }


def _secrets(keys: Keys, redis_url: str) -> dict[str, str]:
    password = password_of(redis_url)
    known = {"HEADRACE_API_KEY_FILE": keys.api_key, _INTERNAL_KEY_FILE: keys.internal_key}
    return known | ({"HEADRACE_REDIS_PASSWORD_FILE": password} if _fits_a_file(password) else {})


def _fits_a_file(password: str) -> bool:
    return len(password.split()) == 1


def _common_environment(state: StateDir, redis_url: str) -> dict[str, str]:
    # The secrets in the user's environment are for other services, and torchrun's variables describe the processes of
    # the user's script: a training rank that had them would wait for ranks that do not exist.
    inherited = {
        name: value
        for name, value in importable_environment().items()
        if name not in SECRETS and name not in _TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return {
        **inherited,
        "HEADRACE_REDIS_URL": without_password(redis_url) if _fits_a_file(password_of(redis_url)) else redis_url,
        "HEADRACE_HOST": "127.0.0.1",
        "HEADRACE_API_KEYS_FILE": os.path.abspath(os.environ.get("HEADRACE_API_KEYS_FILE") or state.api_keys_file),
        # `my_rewards:function` and `my_tools:function` are also looked for in the user's working directory, where
        # Python scripts write theirs, and where clients upload theirs.
        **{
            variable: _joined_path(
                os.environ.get(variable),
                os.getcwd(),
                str(state.functions),
                os.environ.get("HEADRACE_CODE_UPLOADS_DIR"),
            )
            for variable in ("HEADRACE_REWARD_PATH", "HEADRACE_TOOL_PATH")
        },
    }


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}


def _joined_path(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)
