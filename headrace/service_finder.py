"""Finds the services that a command talks to, from its options and the environment.

--url                             names a service on another machine
--state-dir                       names the directory of a `headrace up` on this machine
HEADRACE_URL                      names a service on another machine
HEADRACE_STATE_DIR, ./.headrace   name the directory of a `headrace up` on this machine

The first that is set is used. It also decides where the API key comes from (known_keys.py), and the CA file for the
service's certificate: from HEADRACE_TLS_CA_FILE, or from the directory of `headrace up`.
"""

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.addresses import refuse_unless_http
from headrace.api_connection import ServiceAwayError
from headrace.client import HeadraceApiError, HeadraceClient
from headrace.known_keys import key_of_environment, unused_variables
from headrace.local import process_table
from headrace.local.state_dir import Endpoint, StateDir, choose_state_dir
from headrace.run_lines import run_lines
from shared.errors import HeadraceError, UserError
from shared.near_name import nearest
from shared.service.tls import CA_VARIABLE

_ANSWER_S, _SUBMIT_S = 15.0, 300.0
"""The run API waits 10 s for Redis before it reports Redis as unreachable. A submit reads model and dataset."""
_MOST_COMPARED = 1000
"""Runs, the newest, among which a similar name is looked for."""
_NO_SUCH_RUN, _AMBIGUOUS_RUN, _UNAUTHORIZED = "/problems/no-such-run", "/problems/ambiguous-run", 401


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--url`` and ``--state-dir``, which choose the services that a command talks to."""
    parser.add_argument("--url", help="run API on another machine; its key: HEADRACE_API_KEY, or HEADRACE_API_KEY_FILE")
    add_state_dir_argument(parser)


def add_state_dir_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--state-dir``, which names the directory of services that `headrace up` runs on this machine."""
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where `headrace up` keeps keys, Redis data, logs and runs (./.headrace)"
    )


def connect(arguments: argparse.Namespace, *, is_repeated: bool = False) -> HeadraceClient:
    """Return a client of the run API that the arguments or the environment choose.

    For services on this machine, a line on standard error says if the generators are simulated, unless ``is_repeated``.

    Raises:
        UserError: No service was found (the message says where it was looked for), or a key or address is invalid.
    """
    url = _url_elsewhere(arguments)
    if url:
        key = key_elsewhere(url)
        return HeadraceClient(url, key, timeout_s=_ANSWER_S, submit_timeout_s=_SUBMIT_S, ca_file=ca_file_elsewhere())
    state, endpoint = local_service(arguments)
    if endpoint.num_simulated and not is_repeated:
        sys.stderr.write(f"SIMULATED: {endpoint.simulated_note()}\n")
    key = state.keys().api_key
    return HeadraceClient(
        endpoint.api_url, key, timeout_s=_ANSWER_S, submit_timeout_s=_SUBMIT_S, ca_file=endpoint.ca_file
    )


def is_there(arguments: argparse.Namespace) -> bool:
    """Return whether ``--url`` or HEADRACE_URL names a service, or `headrace up` runs in the chosen state directory."""
    if _url_elsewhere(arguments):
        return True
    endpoint = StateDir(choose_state_dir(arguments.state_dir)).endpoint()
    return endpoint is not None and process_table.is_alive(endpoint.launcher)


def ca_file_elsewhere(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the CA file in HEADRACE_TLS_CA_FILE for a service on another machine, or None for the public CAs."""
    named = environment.get(CA_VARIABLE, "")
    return Path(named) if named else None


def key_elsewhere(url: str) -> str:
    """Return the API key for a service on another machine, from HEADRACE_API_KEY or its ``_FILE`` variable.

    Raises:
        UserError: The address cannot be used, no key is set, or the file holds none.
    """
    refuse_unless_http(url)
    key = key_of_environment("api_key").key
    if not key:
        raise UserError(
            f"set HEADRACE_API_KEY to the API key of {url}, or HEADRACE_API_KEY_FILE to the path of a file with it"
        )
    return key


def local_service(arguments: argparse.Namespace, *, instead: str = "") -> tuple[StateDir, Endpoint]:
    """Return the state directory of the running `headrace up`, and the addresses of its services.

    Raises:
        UserError: Nothing is running. The message names the directory, and has ``instead`` as a further way to go on.
    """
    state = StateDir(choose_state_dir(arguments.state_dir))
    endpoint = state.endpoint()
    if endpoint is None or not process_table.is_alive(endpoint.launcher):
        raise UserError(
            f"no headrace service found (looked at {state.path}): start one with `headrace up`{instead}"
            f"{_readable_runs(state)}"
        )
    return state, endpoint


def _readable_runs(state: StateDir) -> str:
    """Return the end of an error message: commands that read the runs in a state directory from their files.

    The text is empty if there are no runs.
    """
    if not any(state.runs.glob("*/config.json")):
        return _runs_of_scripts(state)
    return f", or read its runs from their files with {_commands_for(state.runs)}"


def _runs_of_scripts(state: StateDir) -> str:
    """Return the end of an error message: commands that read the newest script's runs from their files.

    The text is empty if no script ran.
    """
    found = sorted({config.parents[1] for config in state.path.glob("script-*/runs/*/config.json")}, reverse=True)
    if not found:
        return ""
    more = f" ({len(found) - 1} more in {state.path})" if len(found) > 1 else ""
    return f", or read the runs of scripts from their files with {_commands_for(found[0])}{more}"


def _commands_for(runs: Path) -> str:
    return f"`headrace runs {shlex.quote(str(runs))}` and `headrace show {shlex.quote(f'{runs}/RUN')}`"


def in_terms_of_commands(error: HeadraceError, arguments: argparse.Namespace) -> str:
    """Return an error's message, reworded for the command line: with commands instead of HTTP requests."""
    listed = _listed(error)
    source = getattr(arguments, "source", None) if getattr(arguments, "file", None) is None else None
    if source and listed and isinstance(error, HeadraceApiError):
        listed.append(f"with --from, the other settings come from {source}; --set NAME=null leaves one out")
    if len(listed) > 1:
        return "\n  ".join(["the run is refused:", *listed])
    if not isinstance(error, HeadraceApiError):
        return str(error)
    if error.problem.get("type") == _NO_SUCH_RUN:
        named = str(error.problem.get("run_id") or "")
        near = _near_run(named, arguments)
        hint = f"; did you mean {near}?" if near else "; `headrace runs` lists them"
        return f"there is no run {named or 'of this id'}{hint}"
    if error.problem.get("type") == _AMBIGUOUS_RUN:
        return (
            f"several runs fit {error.problem['run_id']}; use the id of one:\n{run_lines(error.problem['candidates'])}"
        )
    if error.status == _UNAUTHORIZED:
        return _refused(arguments)
    is_local = not hasattr(arguments, "rewarder_url") and not _url_elsewhere(arguments)
    if is_local and isinstance(error, ServiceAwayError):
        return f"{error}{_readable_runs(StateDir(choose_state_dir(arguments.state_dir)))}"
    return str(error)


def _near_run(named: str, arguments: argparse.Namespace) -> str | None:
    """Return the run name or id most similar to ``named``; None if none is similar or the runs cannot be listed."""
    try:
        with connect(arguments, is_repeated=True) as client:
            runs = [*itertools.islice(client.each_run(), _MOST_COMPARED)]
    except HeadraceError:
        return None
    names = dict.fromkeys(str(run["name"]) for run in runs if run.get("name"))
    return nearest(named, names) or nearest(named, [str(run["run_id"]) for run in runs])


def _listed(error: HeadraceError) -> list[str]:
    """Return the problems with a refused run's settings, one sentence each; an empty list for other errors."""
    if isinstance(error, UserError):
        pairs = [*error.problems]
    elif isinstance(error, HeadraceApiError):
        pairs = [(item.get("field", ""), item.get("message", "")) for item in error.problem.get("errors", ())]
    else:
        pairs = []
    return [f"{field}: {sentence}" if field else sentence for field, sentence in pairs]


def _refused(arguments: argparse.Namespace) -> str:
    is_about_rewards = hasattr(arguments, "rewarder_url")
    option = "--rewarder-url" if is_about_rewards else "--url"
    url = arguments.rewarder_url if is_about_rewards else _url_elsewhere(arguments)
    if url:
        source = key_of_environment("api_key").source
        return f"{url} does not accept the key in {source}; set it to the API key of that service"
    state = StateDir(choose_state_dir(arguments.state_dir))
    says = (
        f"the service does not accept the key in {state.api_key_file}, which has changed since the service was "
        f"started: restart it, or name it with {option} and set HEADRACE_API_KEY to its key"
    )
    unused = ", ".join(unused_variables("api_key", state.keys().api_key))
    if not unused:
        return says
    return f"{says} ({unused}: set, but not used for the service of {state.path}; it is used with {option})"


def _url_elsewhere(arguments: argparse.Namespace) -> str | None:
    given: str | None = getattr(arguments, "url", None)  # `up`, `down` and `demo` have no such option
    return given or (None if arguments.state_dir else os.environ.get("HEADRACE_URL"))
