"""Scans the rendered chart with checkov: ``make policy-scan``, or ``python deploy/helm/policy_scan.py CHECKOV``.

    every values file --Helm--> manifests --checkov--> findings --EXPLAINED--> exit status 0, or 1 with the differences

A finding is either fixed, or accepted with a reason in EXPLAINED. A reason without a finding is also an error. CHECKOV
is the path of the program. It has its own environment, because its pinned versions conflict with other packages.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from helm_python import chart

_TIMEOUT_S = 300.0

CHART = Path(__file__).resolve().parent / "headrace"

EXPLAINED = {
    "CKV_K8S_8": {"test": "the pod of `helm test` runs to its end, and its exit status is the result"},
    "CKV_K8S_9": {"test": "as CKV_K8S_8"},
    "CKV_K8S_11": dict.fromkeys(
        ("trainer", "trainer-node", "generator", "rewarder", "sessions", "redis", "test"),
        "a processor limit would throttle the threads that launch kernels, and every collective waits for them; "
        "requests are set, and values may set limits",
    ),
    "CKV_K8S_15": dict.fromkeys(
        ("trainer", "trainer-node", "generator", "rewarder", "sessions", "redis", "test"),
        "tags are versions and are never moved, or a digest is named; images of many gigabytes should not be pulled "
        "again, and kind has no registry",
    ),
    "CKV_K8S_40": dict.fromkeys(
        ("trainer", "generator", "rewarder", "sessions", "redis", "test"),
        "OpenShift assigns its own users to each namespace, so values-openshift.yaml removes ours; everywhere else the "
        "user is 10001",
    ),
    "CKV_K8S_43": dict.fromkeys(
        ("trainer", "trainer-node", "generator", "rewarder", "sessions", "redis", "test"),
        "users build the images, so they set the digests: images.*.digest and redis.image.digest",
    ),
}
"""Reasons for accepted findings, by check and workload."""


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    if len(arguments) != 1:
        print("usage: policy_scan.py CHECKOV", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        for path in [CHART / "values.yaml", *sorted(CHART.glob("values-*.yaml"))]:
            manifests = chart.Chart.load(CHART).render(
                yaml.safe_load(path.read_text()), name="headrace", namespace="rl"
            )
            objects = "\n---\n".join(text for name, text in manifests.items() if name.endswith(".yaml"))
            (Path(directory) / path.name).write_text(objects)
        found = findings(arguments[0], directory)
    return judge(found)


def findings(checkov: str, directory: str) -> dict[tuple[str, str], str]:
    """Return the names of the failed checks, by check id and workload."""
    command = [checkov, "--framework", "kubernetes", "--directory", directory, "--output", "json", "--quiet"]
    command += ["--skip-download", "--soft-fail"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        sys.exit(f"checkov did not finish within {_TIMEOUT_S:.0f} s")
    try:
        report: Any = json.loads(done.stdout)
        failed = report["results"]["failed_checks"]
        assert report["summary"]["passed"] > 100, "it checked nothing"
        assert report["summary"]["parsing_errors"] == 0, "it could not read a manifest"
    except (ValueError, LookupError, TypeError) as error:
        sys.exit(f"checkov gave no report ({error!r}):\n{done.stderr[-2000:]}")
    return {(one["check_id"], one["resource"].rpartition("headrace-")[2]): one["check_name"] for one in failed}


def judge(found: dict[tuple[str, str], str]) -> int:
    """Print findings without a reason and reasons without a finding; return the exit status."""
    explained = {(check, workload) for check, reasons in EXPLAINED.items() for workload in reasons}
    for check, workload in sorted(found.keys() - explained):
        print(f"{workload}: {check} {found[check, workload]}: fix it, or add a reason to {Path(__file__).name}")
    for check, workload in sorted(explained - found.keys()):
        print(f"{workload}: {check} has a reason but was not found: remove it from {Path(__file__).name}")
    if found.keys() == explained:
        print(f"{len(found)} findings, each with its reason in {Path(__file__).name}, and no others")
    return int(found.keys() != explained)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
