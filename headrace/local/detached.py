"""Starts `headrace up` in the background, and waits until its run API answers."""

import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime

from headrace.local import guarded_exec
from headrace.local.service_specs import UpSettings, importable_environment
from headrace.local.state_dir import Endpoint, StateDir
from shared.errors import UserError

_DETACHED_START_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.1
_BEGINS = "headrace up --detach"
"""Beginning of a launcher's first line in its log, which has those of earlier launchers, too."""


def start_detached(
    settings: UpSettings, *, outlives_us: bool, variables: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start `headrace up` in a process session of its own, with its output in the state directory's logs/launcher.log.

    Unless ``outlives_us``, `headrace up` ends when this process dies. ``variables`` are added to its environment.
    """
    state = StateDir(settings.state_dir)
    state.make()
    command = [] if outlives_us else guarded_exec.guard()
    command += [sys.executable, "-m", "headrace", "up", "--state-dir", str(settings.state_dir)]
    if settings.num_simulated:
        command += ["--simulate", str(settings.num_simulated)]
    else:
        command += ["--generators", str(settings.num_generators)]
    if settings.api_port is not None:
        command += ["--port", str(settings.api_port)]
    if settings.repairs_redis:
        command.append("--repair-redis")
    with (state.logs / "launcher.log").open("ab") as log_file:
        log_file.write(f"{_BEGINS} at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}\n".encode())
        log_file.flush()
        return subprocess.Popen(
            command,
            env={**importable_environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )


def wait_until_up(settings: UpSettings, process: "subprocess.Popen[bytes]") -> Endpoint:
    """Wait until a detached `headrace up` has started its services, and return their addresses.

    Raises:
        UserError: `headrace up` ended, or was not up within two minutes and was told to end.
    """
    state = StateDir(settings.state_dir)
    deadline = time.monotonic() + _DETACHED_START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log = (state.logs / "launcher.log").read_text(encoding="utf-8", errors="replace")
            said = log.rpartition(_BEGINS)[2].partition("\n")[2].strip()
            raise UserError(said.removeprefix("headrace: ") or f"the launcher ended with {process.returncode}")
        endpoint = state.endpoint()
        if endpoint is not None and endpoint.launcher.pid == process.pid and endpoint.is_ready:
            return endpoint
        time.sleep(_LOOK_EVERY_S)
    process.terminate()
    raise UserError(f"headrace did not come up in {_DETACHED_START_TIMEOUT_S:.0f} s; the logs are in {state.logs}")
