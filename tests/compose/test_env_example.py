"""deploy/.env.example and docs/docker-compose.md agree with deploy/docker-compose.yml."""

import re
import subprocess

from services.trainer.settings import TrainerSettings
from tests.compose.compose_file import DEPLOY, HARDWARE, ROOT, variables


def test_env_example_says_every_variable_with_its_default() -> None:
    lines = (DEPLOY / ".env.example").read_text(encoding="utf-8").splitlines()
    told = dict(re.findall(r"^#?([A-Z][A-Z0-9_]+)=(.*)$", "\n".join(lines), re.M))
    chosen = {"COMPOSE_PROFILES", "HEADRACE_REVISION"}
    examples = {f"HEADRACE_REWARDER_{name}" for name in ("GPUS", "RUNTIME", "TARGET", "FLAVOUR")}
    for name, defaults in variables().items():
        if name in chosen | examples | {"HEADRACE_ENGINE_ARGS"}:
            continue
        assert name in told, f".env.example does not mention {name}"
        assert told[name] in defaults, name
    assert set(told) - set(variables()) == {"COMPOSE_PROFILES"}, "the file mentions a variable that no service reads"
    assert told["COMPOSE_PROFILES"] in HARDWARE


def test_the_gpus_of_env_example_are_all_used_and_none_twice() -> None:
    text = (DEPLOY / ".env.example").read_text(encoding="utf-8")
    told = dict(re.findall(r"^(HEADRACE_[A-Z_]+)=(.*)$", text, re.M))
    rows = re.findall(r"^# +(\d) +([\d,]+) +([\d,]+) +(\d)$", text, re.M)
    assert [row[0] for row in rows] == ["2", "4", "8"]
    set_there = tuple(told[f"HEADRACE_{name}"] for name in ("TRAINER_GPUS", "GENERATOR_GPUS", "GENERATORS"))
    assert set_there == rows[0][1:]
    for num_gpus, training, generating, num_generators in rows:
        assert [*training.split(","), *generating.split(",")] == [str(index) for index in range(int(num_gpus))]
        assert int(num_generators) * int(told["HEADRACE_GPUS_PER_REPLICA"]) == len(generating.split(","))


def test_the_page_starts_the_stack_that_its_later_commands_speak_to() -> None:
    page = (ROOT / "docs" / "docker-compose.md").read_text(encoding="utf-8")
    commands = re.findall(r"^docker compose .*$", page, re.M)
    assert commands
    assert not [command for command in commands if "--profile" in command], "it replaces the value in .env"
    (change,) = re.findall(r"^sed -i '(.*)' \.env$", page, re.M)
    example = (DEPLOY / ".env.example").read_text(encoding="utf-8")
    done = subprocess.run(["sed", change], input=example, capture_output=True, text=True, check=True)
    assert re.findall("^COMPOSE_PROFILES=(.*)$", done.stdout, re.M) == ["cpu"]


def test_a_variable_that_reaches_no_container_can_be_set_as_the_page_says() -> None:
    page = (ROOT / "docs" / "docker-compose.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if "that `.env.example` does not list" in line]
    assert "docker-compose.override.yml" in row
    (name,) = re.findall(r"`(HEADRACE_\w+)`", row)
    assert name not in variables(), "the file lists it"
    assert name.removeprefix("HEADRACE_").lower() in TrainerSettings.model_fields
