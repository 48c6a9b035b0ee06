"""Runs schemathesis against a service: every response must match its OpenAPI document, for valid and invalid requests.

It runs all phases (examples, coverage, fuzzing, stateful) and all checks. schemathesis.toml has exceptions that a
schema cannot express. The suite runs a few examples with a fixed seed. With SCHEMATHESIS_SECONDS it runs for that time,
with a new seed each time.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

_CONFIG = Path(__file__).with_name("schemathesis.toml")
_COMMAND = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()")
_MAX_EXAMPLES, _SEED = "10", "1"
_SUITE_S = 540.0
"""For a busy machine."""


def check_schema(url: str, key: str, directory: Path, *, more_config: str = "", without: Sequence[str] = ()) -> str:
    """Run schemathesis and assert that it finds nothing.

    Args:
        url: The service's address.
        key: A key for all operations.
        directory: For its files.
        more_config: Appended to schemathesis.toml.
        without: Ids of operations that are left out.

    Returns:
        Its report.
    """
    config = directory / "schemathesis.toml"
    config.write_text(f"{_CONFIG.read_text()}\n{more_config}")
    seconds = os.environ.get("SCHEMATHESIS_SECONDS", "")
    amount: tuple[str, ...] = ("--max-examples", _MAX_EXAMPLES, "--seed", _SEED, "--generation-deterministic")
    if seconds:
        amount = ("--max-time", seconds, "--seed", str(secrets.randbelow(2**32)))
    report = directory / "schemathesis.log"
    with report.open("w") as output:
        done = subprocess.run(
            [
                *(*_COMMAND, "--config-file", str(config), "run", f"{url}/openapi.json"),
                *("--header", f"Authorization: Bearer {key}", "--continue-on-failure", *amount),
                *("--phases", "examples,coverage,fuzzing,stateful", "--request-timeout", "60"),
                *("--suppress-health-check", "all", "--no-color"),
                *(word for name in without for word in ("--exclude-operation-id", name)),
            ],
            cwd=directory,
            env={**os.environ, "NO_PROXY": "*", "PYTHONPATH": ""},
            stdout=output,
            stderr=output,
            timeout=_SUITE_S + float(seconds or 0) * 1.5,
            check=False,
        )
    said = report.read_text()
    assert done.returncode == 0, said
    document = httpx.get(
        f"{url}/openapi.json", headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=30
    ).json()
    assert f"Tested: {sum(map(len, document['paths'].values())) - len(without)}\n" in said, said
    if seconds:
        sys.stderr.write(said[-1500:])
    return said
