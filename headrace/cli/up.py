"""`headrace up`, `headrace scale` and `headrace down`: start, resize and stop all services on this machine."""

import argparse
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

from headrace.addresses import redis_address
from headrace.known_keys import secret_of
from headrace.local import cpu_placement, launcher, process_table
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.service_specs import UpSettings
from headrace.local.state_dir import StateDir, choose_state_dir
from headrace.terminal import say
from shared.errors import UserError
from shared.install_commands import install_extras
from shared.service.secret_files import with_password
from shared.service.tls import ServerCertificate, trusted, why_refused

_SCALE_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.1
_LAST_PORT = 65535


def up(arguments: argparse.Namespace) -> int:
    """Start Redis and the services. Return when they have ended or, with --detach, as soon as they are up."""
    settings = UpSettings(
        state_dir=choose_state_dir(arguments.state_dir),
        num_generators=arguments.generators,
        num_simulated=arguments.simulate,
        api_port=arguments.port,
        metrics_port=_metrics_port(),
        redis_url=_redis_url(),
        repairs_redis=arguments.repair_redis,
        **_tls(),
    )
    if settings.repairs_redis and settings.redis_url is not None:
        raise UserError("--repair-redis is for the embedded Redis, but HEADRACE_REDIS_URL names another one")
    for directory in (Path.cwd(), settings.state_dir):
        if os.pathsep in str(directory):
            raise UserError(
                f"{directory} has a colon in its path, which separates directories in a search path; use another one"
            )
    if missing := [name for name in ("fastapi", "uvicorn") if not _is_installed(name)]:
        extras = install_extras("trainer", "rewarder", "sessions")
        raise UserError(f"`headrace up` needs {' and '.join(missing)}; install with {extras}")
    if unused := cpu_placement.num_unused_gpus(os.environ):
        say(
            f"note: the CPU build of torch is installed here, so trainer and generators use no GPU ({unused} visible); "
            "docs/installing.md says how to install for GPUs"
        )
    if arguments.detach:
        return _up_detached(settings)
    return launcher.run(settings, say=say)


def down(arguments: argparse.Namespace) -> int:
    """Stop the `headrace up` of a state directory and its services, and wait until all their processes are gone."""
    state = StateDir(choose_state_dir(arguments.state_dir))
    endpoint = state.endpoint()
    if endpoint is None or not process_table.is_alive(endpoint.launcher):
        say(f"nothing is running on {state.path}")
        return 0
    killed = process_table.end([endpoint.launcher], patience_s=endpoint.end_patience_s)
    if killed:
        # A killed launcher ends no services, so end them here.
        process_table.end(endpoint.processes.values(), patience_s=endpoint.end_patience_s)
        state.forget_endpoint()
    say(f"stopped; runs and logs are in {state.path}")
    return 0


def scale(arguments: argparse.Namespace) -> int:
    """Tell a running `headrace up` to change its number of generators, and wait until it has done so.

    Raises:
        UserError: Nothing is running, the generators are simulated, or it took more than a minute.
    """
    state = StateDir(choose_state_dir(arguments.state_dir))
    endpoint = state.endpoint()
    if endpoint is None or not process_table.is_alive(endpoint.launcher):
        raise UserError(
            f"nothing is running on {state.path}; start it with `headrace up --generators {arguments.generators}`"
        )
    if endpoint.num_simulated:
        generators = "generators" if endpoint.num_simulated > 1 else "generator"
        raise UserError(
            f"{endpoint.num_simulated} simulated {generators} run in one process, and their number cannot be changed; "
            f"run `headrace down` and then `headrace up --simulate {arguments.generators}`: "
            "a run goes on from its checkpoint"
        )
    state.want_generators(arguments.generators)
    try:
        os.kill(endpoint.launcher.pid, signal.SIGUSR1)
    except ProcessLookupError as error:
        raise UserError(
            f"headrace on {state.path} has just ended; start it with `headrace up --generators {arguments.generators}`"
        ) from error
    wanted = {f"generator-{index}" for index in range(arguments.generators)}
    deadline = time.monotonic() + _SCALE_PATIENCE_S
    while time.monotonic() < deadline:
        now = state.endpoint()
        if now is not None and {name for name in now.processes if name.startswith("generator-")} == wanted:
            say(f"generators: {len(wanted)}; a new one takes prompts once it has its model and the newest weights")
            return 0
        time.sleep(_LOOK_EVERY_S)
    raise UserError(f"the launcher did not scale in {_SCALE_PATIENCE_S:.0f} s; its messages are where it was started")


def _redis_url() -> str | None:
    """Return HEADRACE_REDIS_URL with the password from HEADRACE_REDIS_PASSWORD_FILE; None if no URL is set."""
    url, file = os.environ.get("HEADRACE_REDIS_URL"), os.environ.get("HEADRACE_REDIS_PASSWORD_FILE")
    if not url:
        return None
    if not url.startswith("unix://"):
        redis_address(url, {})  # refuses what cannot be read, without showing a password
    if not file:
        return url
    password = secret_of(file, "HEADRACE_REDIS_PASSWORD_FILE")
    try:
        return with_password(url, password)
    except ValueError as error:
        raise UserError(str(error)) from error


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # something has put None into sys.modules
        return False


def _tls() -> dict[str, Any]:
    """Return the TLS settings of the environment as arguments of UpSettings; empty without certificate and key.

    Raises:
        UserError: headrace's own clients would refuse the certificate, or only one of certificate and key is set.
    """
    cert, key, ca = (os.environ.get(f"HEADRACE_TLS_{name}_FILE", "") for name in ("CERT", "KEY", "CA"))
    if not (cert or key):
        return {}
    if not (cert and key):
        raise UserError("set both HEADRACE_TLS_CERT_FILE and HEADRACE_TLS_KEY_FILE, or neither")
    ca_file = Path(ca).absolute() if ca else None
    server = ServerCertificate(Path(cert), Path(key)).context
    if why := why_refused(server, trusted(ca_file), host="127.0.0.1"):
        raise UserError(
            f"HEADRACE_TLS_CERT_FILE: the services on 127.0.0.1 could not call each other with {cert}: {why}"
        )
    return {"scheme": "https", "ca_file": ca_file}


def _metrics_port() -> int:
    text = os.environ.get("HEADRACE_METRICS_PORT") or "0"
    if not text.isascii() or not text.isdigit() or int(text) > _LAST_PORT:
        raise UserError(
            f"HEADRACE_METRICS_PORT={text} is not a port; give the first of consecutive free ports, one per service"
        )
    return int(text)


def _up_detached(settings: UpSettings) -> int:
    process = start_detached(settings, outlives_us=True)
    try:
        endpoint = wait_until_up(settings, process)
    except KeyboardInterrupt:
        process.terminate()
        raise
    for line in launcher.announcement(StateDir(settings.state_dir), endpoint, metrics_port=settings.metrics_port):
        say(line)
    say("`headrace down` stops everything.")
    return 0
