"""`headrace up` with a certificate: a run is trained, and all HTTP connections between the services use TLS."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.local.state_dir import StateDir
from tests.integration.stack import Stack, assert_every_group_is_accounted_for
from tests.tls.authority import Authority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

USER_CODE = '''
def length(completion_ids, **columns):
    return [float(len(set(ids))) for ids in completion_ids]


def now() -> str:
    """Return the time."""
    return "noon"
'''


def headrace(*arguments: str, state: StateDir, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HEADRACE_STATE_DIR": str(state.path),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_run_is_trained_over_tls_and_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca")
    issued = authority.issue()
    for name, value in issued.environment(authority).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_code.py").write_text(USER_CODE)
    with Stack(tmp_path, num_simulated=2) as stack:
        endpoint = stack.state.endpoint()
        assert endpoint is not None
        urls = [endpoint.api_url, endpoint.rewarder_url, endpoint.sessions_url, *endpoint.generator_urls]
        assert all(url.startswith("https://127.0.0.1:") for url in urls)
        for url in urls:
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url.replace('https', 'http')}/livez", trust_env=False, timeout=120)
        stack.wait_for_rewarder()
        # With a tool, so that the sessions service asks the generators for turns.
        with_tool = {"tools": ["user_code:now"], "prompt_as_message": True}
        run_id = stack.client.submit(run_file(reward_funcs=["user_code:length"], **with_tool, max_steps=4)).run_id
        addresses = set[str]()  # from the run's replicas, which leave it when it ends
        while not addresses and (seen := stack.client.get(run_id))["status"] in ("queued", "running"):
            addresses = {it["url"].partition("/replicas/")[0] for it in seen["generators"]}
        run = stack.wait_for_end(run_id)
        assert run["status"] == "finished", run
        assert_every_group_is_accounted_for(run, groups_per_step=4)
        assert run["progress"]["pushes_confirmed"] == run["progress"]["pushes"] >= 4
        assert addresses == set(endpoint.generator_urls)

        # The commands read addresses, keys and the CA from the files that `headrace up` wrote.
        examined = json.loads(headrace("doctor", "--json", state=stack.state).stdout)
        assert [one for one in examined["findings"] if one["level"] == "problem"] == []
        assert {"trainer", "rewarder", "sessions"} < set(examined["services"]), "at least one generator"
        assert headrace("rewards", "list", state=stack.state).returncode == 0

        # From elsewhere, options and variables are needed.
        elsewhere = {"HEADRACE_URL": endpoint.api_url, "HEADRACE_API_KEY": stack.state.keys().api_key}
        assert (
            run_id in headrace("runs", state=stack.state, **elsewhere, HEADRACE_TLS_CA_FILE=str(authority.file)).stdout
        )
        untold = headrace("runs", state=stack.state, **elsewhere).stderr
        assert "its certificate is not trusted here" in untold
        assert "set HEADRACE_TLS_CA_FILE to a file with the certificate of the CA that issued it" in untold
        plain = headrace(
            "runs", state=stack.state, **elsewhere | {"HEADRACE_URL": endpoint.api_url.replace("https", "http")}
        )
        assert "a server that speaks TLS closes the connection like this: if it does, write https://" in plain.stderr

        # A certificate from another CA replaces the first one, without a restart of the services.
        before = stack.state.endpoint()
        successor = Authority(tmp_path / "ca", "its successor")
        successor.issue()
        told = {**elsewhere, "HEADRACE_TLS_CA_FILE": str(successor.file)}
        for _ in range(100):
            if run_id in headrace("runs", state=stack.state, **told).stdout:
                break
        else:
            raise AssertionError("the renewed certificate was not shown")
        now = stack.state.endpoint()
        assert before is not None
        assert now is not None
        assert now.processes == before.processes
    assert stack.exit_code == 0


def test_a_certificate_that_our_own_services_would_refuse_ends_headrace_up_before_anything_starts(
    tmp_path: Path,
) -> None:
    authority, state = Authority(tmp_path / "ca"), StateDir(tmp_path / "state")
    for issued, why in (
        (authority.issue("trainer.example"), "its certificate is not for 127.0.0.1: issue one that names it"),
        (authority.issue(days=-1, file="expired"), "its certificate has expired"),
    ):
        refused = headrace("up", "--simulate", state=state, **issued.environment(authority))
        assert refused.returncode == 1
        assert why in refused.stderr
    alone = {"HEADRACE_TLS_CERT_FILE": str(issued.cert)}
    assert "set both HEADRACE_TLS_CERT_FILE and" in headrace("up", "--simulate", state=state, **alone).stderr
    assert not state.path.exists()
