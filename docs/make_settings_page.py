"""Writes settings.md from the services' settings: ``python docs/make_settings_page.py``. A test compares the two.

Only the defaults that a function makes are written here.
"""

import sys
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from services.trainer.settings import TrainerSettings
from shared.settings import ServiceSettings

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings of the services

For operators: every environment variable that a service reads, with its default. A service reads them once, when it
starts. Wrong values end it with a line for each of them, and an unknown variable that begins with `HEADRACE_` causes
a warning. Times are in seconds. An empty default means that the variable is not set. Lists and tables are written as
JSON where their meaning names no separator. [Starting the services one by one](../deploy/README.md) has the variables
that most deployments set.

`headrace up` gives its own environment to the services that it starts, with addresses, ports, keys and directories of
its own. Variables that commands read are in [operations](operations.md#where-a-command-finds-the-services) and in
[From Python](python.md#a-deployment-elsewhere). Variables of simulated generators have [a page of their
own](simulated-generator.md#the-time-model). The trainer's traces have
`OTEL_EXPORTER_OTLP_ENDPOINT` ([monitoring](watching.md)).
"""
TABLE = "| variable | default | meaning |\n|---|---|---|\n"
SERVICES: list[tuple[str, type[ServiceSettings]]] = [
    ("Trainer", TrainerSettings),
    ("Generator", GeneratorSettings),
    ("Rewarder", RewarderSettings),
    ("Sessions", SessionsSettings),
]
COMPUTED = {
    "runs_dir": "`runs` in the working directory",
    "rank_command": "`python -m services.trainer.rank`",
    "rank_env": "",
    "num_reward_workers": "half of the CPUs",
    "num_tool_workers": "the CPUs",
}


def page() -> str:
    """Return the page as it should be."""
    shared = ServiceSettings.model_fields
    parts = [HEAD, _section("All services", shared)]
    for service, settings in SERVICES:
        own = {name: it for name, it in settings.model_fields.items() if name not in shared}
        parts.append(_section(service, own))
    return "\n".join(parts)


def _section(heading: str, fields: dict[str, FieldInfo]) -> str:
    return f"## {heading}\n\n{TABLE}" + "".join(_row(name, field) for name, field in fields.items())


def _row(name: str, field: FieldInfo) -> str:
    if not field.description:
        raise SystemExit(f"the setting {name} has no description")
    meaning = field.description.replace("|", "\\|")
    return f"| `HEADRACE_{name.upper()}` | {_default(name, field)} | {meaning} |\n"


def _default(name: str, field: FieldInfo) -> str:
    if name in COMPUTED:
        return COMPUTED[name]
    if field.default_factory is not None:
        raise SystemExit(f"a function makes the default of {name}; describe it in COMPUTED of {__file__}")
    default: Any = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if default in (None, "", (), {}):
        return ""
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
