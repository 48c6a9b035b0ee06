"""The program of `helm test`: submits a small run and checks that tokens are sampled with pushed weights.

    submit_run.py URL KEY_FILE TIMEOUT_S SETTINGS_JSON [MODELS_DIR]

Exit status 0 means that the run finished, every push was confirmed, and tokens were sampled with a policy version above
0. Otherwise it is 1, with a message. For settings without a model, a tiny one is made in MODELS_DIR.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

POLL_S = 1.0
STEPS = 4
ENDED = ("finished", "stopped", "failed")


class TestError(Exception):
    """The test failed; the message is a sentence for the log."""


class RunApi:
    """A client of the run API."""

    def __init__(self, url, key):
        self.url = url
        self.key = key

    def ask(self, method, path, body=None):
        """Send a request and return the parsed answer; raises TestError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer " + self.key, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120, context=trust()) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            said = error.read(65536).decode(errors="replace")
            raise TestError(f"{method} {path} failed with status {error.code}: {said}") from error
        except OSError as error:
            raise TestError(f"the run API at {self.url} cannot be reached: {error}") from error


def trust():
    """Return a TLS context that trusts the CA in HEADRACE_TLS_CA_FILE, or the public CAs."""
    return ssl.create_default_context(cafile=os.environ.get("HEADRACE_TLS_CA_FILE"))


def main(arguments):
    """Return the exit status."""
    url, key_file, timeout_s, settings, *models_dir = arguments
    try:
        run = settings_of(json.loads(settings), Path(models_dir[0]) if models_dir else None)
        show_that_the_policy_advances(RunApi(url, Path(key_file).read_text().strip()), run, float(timeout_s))
    except TestError as error:
        print(f"helm test: {error}", flush=True)
        return 1
    return 0


def settings_of(given, models_dir):
    """Return the given settings, with defaults for a tiny run."""
    run = {
        "name": "helm-test",
        "reward_funcs": ["repetition_penalty_reward"],
        "num_generations": 4,
        "groups_per_step": 2,
        "max_completion_length": 16,
        "max_steps": STEPS,
        "max_staleness": 1,
        "learning_rate": 1e-3,
    }
    if "model" not in given:
        if models_dir is None:
            raise TestError(
                "no model for the test: set storage.models.enabled, with another accessMode than ReadOnlyMany, and a "
                "tiny model is made there; or set test.run.model, and test.run.dataset_name to a data set"
            )
        sys.path.insert(0, str(Path(__file__).parent))  # also where PYTHONSAFEPATH is set
        from tiny_model import make_tiny_model

        model, dataset = make_tiny_model(models_dir / "headrace-helm-test")
        run.update(model=str(model), dataset_name=str(dataset))
    return {**run, **given}


def show_that_the_policy_advances(api, run, timeout_s):
    """Submit the run and wait until it has finished; raises TestError."""
    deadline = time.monotonic() + timeout_s
    wait_for_api(api, deadline)
    not_ended = "/v1/runs?status=queued&status=running&status=paused"
    busy = [it["run_id"] for it in api.ask("GET", not_ended)["runs"]]
    if busy:
        raise TestError(f"the services are busy with {', '.join(busy)}, so the test run would have to wait")
    answer = api.ask("POST", "/v1/runs", run)
    run_id = answer["run"]["run_id"]
    print(f"submitted {run_id}", *answer["warnings"], sep="\n  ", flush=True)
    try:
        detail = wait_for_end(api, run_id, deadline)
    except TestError:
        api.ask("POST", f"/v1/runs/{run_id}/stop")
        raise
    progress = detail["progress"]
    if detail["status"] != "finished":
        raise TestError(f"{run_id} is {detail['status']}: {detail['reason']}")
    if progress["pushes_confirmed"] < progress["pushes"] or progress["policy_version"] < 1:
        raise TestError(
            f"{run_id}: {progress['pushes_confirmed']} of {progress['pushes']} weight pushes were confirmed"
        )
    versions = sampled_versions(api, run_id)
    if max(versions, default=0) < 1:
        raise TestError(f"{run_id}: all tokens were sampled with the initial weights, although pushes were confirmed")
    print(
        f"{run_id} made {progress['step']} steps; {progress['pushes_confirmed']} of {progress['pushes']} pushes were "
        f"confirmed; tokens were sampled with policy versions {', '.join(map(str, sorted(versions)))}",
        flush=True,
    )


def wait_for_api(api, deadline):
    """Wait until the run API answers; raises TestError."""
    while True:
        try:
            return api.ask("GET", "/readyz")
        except TestError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def wait_for_end(api, run_id, deadline):
    """Wait for the run's end and return the run, printing changes of its state; raises TestError."""
    said = None
    while True:
        detail = api.ask("GET", f"/v1/runs/{run_id}")
        if detail["status"] in ENDED:
            return detail
        progress = detail["progress"]
        line = f"{detail['status']}, step {progress['step']}, policy version {progress['policy_version']}"
        line += f", waiting for {detail['waiting_for']}" if detail["waiting_for"] else ""
        if line != said:
            print(line, flush=True)
            said = line
        if time.monotonic() > deadline:
            raise TestError(f"{run_id} did not end in time: {line}")
        time.sleep(POLL_S)


def sampled_versions(api, run_id):
    """Return the policy versions that sampled the tokens of the newest step."""
    rollouts = api.ask("GET", f"/v1/runs/{run_id}/rollouts?limit=500")["rollouts"]
    return {span[0] for rollout in rollouts for span in rollout["policy_versions"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
