"""The launcher on a Redis with one user per service: ``python launcher_with_users.py STATE_DIR PORT SECRETS_DIR``.

The generator is simulated; its streams, leases and registration are the same as a real generator's.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from headrace.local import launcher
from headrace.local.service_specs import UpSettings, default_commands, generator_spec, service_specs
from headrace.local.supervised_process import ServiceSpec
from headrace.terminal import say


def main() -> int:
    state_dir, port, secrets = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

    def as_user(spec: ServiceSpec) -> ServiceSpec:
        user = spec.name.partition("-")[0]
        own = {
            "HEADRACE_REDIS_URL": f"redis://{user}@127.0.0.1:{port}/0",
            "HEADRACE_REDIS_PASSWORD_FILE": str(secrets / f"redis-password-{user}"),
        }
        keys = {name: key for name, key in spec.secrets.items() if name not in own}
        return dataclasses.replace(spec, environment={**spec.environment, **own}, secrets=keys)

    def specs(*args: Any, **kwargs: Any) -> list[ServiceSpec]:
        return [as_user(spec) for spec in service_specs(*args, **kwargs)]

    def one_generator(*args: Any, **kwargs: Any) -> ServiceSpec:
        return as_user(generator_spec(*args, **kwargs))

    patched: Any = launcher  # which imports both by name
    patched.service_specs = specs
    patched.generator_spec = one_generator
    password = (secrets / "redis-password-trainer").read_text(encoding="utf-8").strip()
    commands = default_commands() | {"generator": (sys.executable, "-m", "services.generator.simulated")}
    settings = UpSettings(
        state_dir=state_dir, redis_url=f"redis://trainer:{password}@127.0.0.1:{port}/0", commands=commands
    )
    return launcher.run(settings, say=say)


if __name__ == "__main__":
    sys.exit(main())
