"""Finds the services for a script, or starts them on this machine.

HEADRACE_URL                      names a deployment elsewhere, whose key is HEADRACE_API_KEY. Files and functions go to
                                  it over HTTP, unless HEADRACE_INPUTS_DIR names a directory that both sides see
HEADRACE_STATE_DIR, ./.headrace   `headrace up` runs services with this state directory
otherwise                         this process starts services in HEADRACE_STATE_DIR or ./.headrace/script-...; they end
                                  with it

A process has one run at a time. When it begins another run, it stops its earlier run if that has not ended, because a
paused run would keep the generators.
"""

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from headrace.client import ENDED, HeadraceApiError, HeadraceClient, Run, Submission
from headrace.grpo.argument_error import ArgumentError, in_python
from headrace.grpo.input_delivery import SharedFiles, Uploads
from headrace.grpo.run_inputs import RunInputs
from headrace.local import process_table
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.service_specs import UpSettings, end_patience_s
from headrace.local.state_dir import STATE_DIR_VARIABLE, Endpoint, StateDir, choose_state_dir
from headrace.service_finder import ca_file_elsewhere, key_elsewhere
from headrace.transfer_progress import progress
from shared.errors import UserError

INPUTS_VARIABLE = "HEADRACE_INPUTS_DIR"
_ANSWER_S, _SUBMIT_S, _STARTING_S = 30.0, 300.0, 120.0

_started: "dict[Path, subprocess.Popen[bytes]]" = {}
"""The launchers that this process started, by state directory."""
_latest_run: dict[str, str] = {}
"""The id of the run that this process submitted last, by the run API's URL."""
os.register_at_fork(after_in_child=_started.clear)  # a forked process has started nothing itself
os.register_at_fork(after_in_child=_latest_run.clear)


class InputDirs(NamedTuple):
    """Directories that a script and its services share: for data and models, and for modules of functions."""

    inputs: Path
    functions: Path
    """On the search paths of the rewarder and the sessions service."""


class ScriptServices:
    """The services that a script trains with: their run API, and the directories in which they find its inputs.

    Args:
        client: A client of the run API.
        shared: Where inputs are written; None if this machine shares no directory with the services.
        state_dir: The services' state directory; None if they run elsewhere.
        in_words: A description of the services for messages, to follow "trains with".
    """

    def __init__(
        self,
        client: HeadraceClient,
        shared: InputDirs | None,
        *,
        state_dir: Path | None = None,
        in_words: str = "",
    ) -> None:
        self.client = client
        self.state_dir = state_dir
        self.in_words = in_words or f"the services at {client.base_url}"
        self._shared = shared
        self._own: Path | None = None

    def see_here(self, directory: Path) -> bool:
        """Return whether a directory that the services named is also on this machine, and this user may read it."""
        return os.path.isdir(directory) and os.access(directory, os.R_OK | os.X_OK)

    def inputs(self) -> RunInputs:
        """Return a writer of the script's inputs. It uploads them unless this machine and the services share files."""
        if self._shared is None:
            return RunInputs(self.own_directory() / "inputs", Uploads(self))
        return RunInputs(self._shared.inputs, SharedFiles(self._shared.functions))

    def own_directory(self) -> Path:
        """Return a temporary directory, which is deleted with this object or at the end of the process."""
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="headrace-"))
            weakref.finalize(self, _remove, self._own, maker=os.getpid())
        return self._own

    def upload(self, path: Path) -> str:
        """Upload a file or directory to services elsewhere, and return its path there. Shows a progress bar."""
        with progress(f"uploading {path.name}") as tell:
            return self.client.upload(path, on_progress=tell)

    def upload_module(self, name: str, source: str) -> str:
        """Upload a Python module to services elsewhere, and return the name by which they import it."""
        return self.client.upload_module(name, source)

    def download_model(self, run: Run, *, base: str, to: Path | None = None) -> Path:
        """Download a run's final model, and return its directory.

        Args:
            run: The run, which has ended.
            base: The script's name for the base model, which is written into the configuration of an adapter.
            to: Where the files are written; by default a directory shared with the services, or else a temporary one.
        """
        directory = to or (self._shared.inputs if self._shared else self.own_directory()) / str(run["run_id"])
        with progress("downloading the model") as tell:
            self.client.download_model(run["run_id"], directory, on_progress=tell)
        name_base(directory, run, base=base)
        return directory


def _remove(directory: Path, *, maker: int) -> None:
    """Remove a directory, unless this process was forked from its maker, which still needs it."""
    if os.getpid() == maker:
        shutil.rmtree(directory, ignore_errors=True)


def name_base(directory: Path, run: Run, *, base: str) -> None:
    """Set the base model in an adapter's configuration to ``base``, if it names the run's own copy of that model."""
    file = directory / "adapter_config.json"
    if base and file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.get("base_model_name_or_path") == run["config"]["model"]:
            config["base_model_name_or_path"] = base
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_services(*, resumed: Path | None = None, say: Callable[[str], None]) -> ScriptServices:
    """Return the services that the environment names or that run on this machine. Without any, start them.

    Args:
        resumed: State directory of an earlier script's services, which are started again; None for no such directory.
        say: Prints a line for the user.

    Raises:
        UserError: No key is set for services elsewhere, or services here do not start within two minutes.
    """
    if url := os.environ.get("HEADRACE_URL"):
        shared_dir = os.environ.get(INPUTS_VARIABLE)
        client = HeadraceClient(
            url, key_elsewhere(url), timeout_s=_ANSWER_S, submit_timeout_s=_SUBMIT_S, ca_file=ca_file_elsewhere()
        )
        directory = Path(shared_dir).absolute() if shared_dir else None
        return ScriptServices(client, InputDirs(directory, directory / "functions") if directory else None)
    state = StateDir(resumed or choose_state_dir(None))
    endpoint = _running(state) or _wait_until_ready(state, say=say)
    if endpoint is None:
        if resumed is None and STATE_DIR_VARIABLE not in os.environ:
            state = StateDir(next(iter(_started), state.path / f"script-{_now()}-{os.getpid()}"))
        endpoint = _running(state) or _start(state, say=say)
    if endpoint.num_simulated:
        say(f"SIMULATED: {endpoint.simulated_note()}")
    client = HeadraceClient(
        endpoint.api_url,
        state.keys().api_key,
        timeout_s=_ANSWER_S,
        submit_timeout_s=_SUBMIT_S,
        ca_file=endpoint.ca_file,
    )
    is_ours = state.path in _started
    in_words = "services started for this script" if is_ours else f"the services of `headrace up` in {state.path}"
    return ScriptServices(client, InputDirs(state.inputs, state.functions), state_dir=state.path, in_words=in_words)


def would_start_services() -> bool:
    """Return whether ``find_services`` would start services, because none are named and none run on this machine."""
    return "HEADRACE_URL" not in os.environ and _launched_endpoint(StateDir(choose_state_dir(None))) is None


def begin_run(
    client: HeadraceClient,
    settings: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    on_begun: Callable[[Submission], None] | None = None,
) -> Submission:
    """Submit a run, and stop the earlier run of this process if that has not ended.

    Args:
        client: A client of the run API.
        settings: The run's settings.
        say: Prints a line for the user.
        on_begun: Called as soon as the run is submitted.

    Raises:
        ArgumentError: The settings are invalid.
        HeadraceApiError: The run was refused for another reason.
    """
    try:
        submission = client.submit(settings)
    except KeyboardInterrupt:
        say(
            "note: the run may have been submitted all the same, and the next one waits for it; `headrace runs` shows "
            "it, and `headrace stop` ends it"
        )
        raise
    except HeadraceApiError as error:
        if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        raise ArgumentError(in_python(str(error))) from None
    if on_begun is not None:
        on_begun(submission)
    stop_other_run(client, submission.run_id, say=say)
    return submission


def stop_other_run(client: HeadraceClient, run_id: str, *, say: Callable[[str], None]) -> None:
    """Record ``run_id`` as this process's run, and stop the process's earlier run if that has not ended.

    A paused run keeps the generators, so the new run would wait for it.
    """
    earlier = _latest_run.get(client.base_url)
    _latest_run[client.base_url] = run_id
    if earlier in (None, run_id):
        return
    with contextlib.suppress(HeadraceApiError):  # it may have been deleted
        if client.get(str(earlier))["status"] not in ENDED:
            say(f"note: {earlier}, which this process began before and which has not ended, is stopped")
            client.stop(str(earlier))


def end_started() -> None:
    """End the services that this process started.

    Runs that have not ended go on when services are started again in the same state directory.
    """
    while _started:
        _, process = _started.popitem()
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=end_patience_s())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _now() -> str:
    return datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")


def _launched_endpoint(state: StateDir) -> Endpoint | None:
    """Return the addresses of services whose launcher is alive; they may still be starting."""
    endpoint = state.endpoint()
    return None if endpoint is None or not process_table.is_alive(endpoint.launcher) else endpoint


def _running(state: StateDir) -> Endpoint | None:
    endpoint = _launched_endpoint(state)
    return None if endpoint is None or not endpoint.is_ready else endpoint


def _wait_until_ready(state: StateDir, *, say: Callable[[str], None]) -> Endpoint | None:
    """Wait for services that another process is starting. Return None if there are none, or their launcher has ended.

    Raises:
        UserError: They are not up after two minutes.
    """
    deadline, has_said = time.monotonic() + _STARTING_S, False
    while (endpoint := _launched_endpoint(state)) is not None and not endpoint.is_ready:
        if time.monotonic() > deadline:
            up = f"`headrace up` in {state.path}"
            raise UserError(f"{up} is not up after {_STARTING_S:g} s; its logs are in {state.logs}")
        if not has_said:
            say(f"waiting for `headrace up` in {state.path}, which is starting")
            has_said = True
        time.sleep(0.1)
    return endpoint


def _start(state: StateDir, *, say: Callable[[str], None]) -> Endpoint:
    for directory in [it for it, process in _started.items() if it != state.path and process.poll() is None]:
        say(f"ending this process's services in {directory}, because a process has one set of services")
    end_started()
    say(f"starting headrace's services for this process; `headrace watch --state-dir {state.path}` shows its run")
    settings = UpSettings(state_dir=state.path)
    atexit.register(end_started)
    process = _started[state.path] = _launched(settings)
    try:
        return wait_until_up(settings, process)
    except BaseException:
        end_started()
        raise


def _launched(settings: UpSettings) -> "subprocess.Popen[bytes]":
    """Start the services' launcher from a thread that waits for its end.

    The kernel ends the launcher together with the thread that started it, so this thread must live as long.
    """
    launched: Future[subprocess.Popen[bytes]] = Future()

    def launch() -> None:
        try:
            process = start_detached(settings, outlives_us=False)
        except BaseException as error:  # noqa: BLE001  the caller raises it
            launched.set_exception(error)
            return
        launched.set_result(process)
        process.wait()

    threading.Thread(target=launch, name=f"launcher of {settings.state_dir}", daemon=True).start()
    return launched.result()
