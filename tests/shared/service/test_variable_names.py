"""A variable that no service reads causes a warning at the start of a service, with the probable right name."""

import logging
import re
from pathlib import Path

import pytest

from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from services.trainer.settings import TrainerSettings
from shared.service.variable_names import DEPLOYMENT, OTHERS, SETTINGS, warn_of_unknown_variables

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[3] / "deploy"


def warnings_of(caplog: pytest.LogCaptureFixture, environment: dict[str, str], simulated: tuple[str, ...] = ()) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_unknown_variables(environment, simulated=simulated)
    return "\n".join(record.getMessage() for record in caplog.records)


def test_every_setting_of_every_service_is_known_and_nothing_else() -> None:
    kinds = (TrainerSettings, RewarderSettings, GeneratorSettings, SessionsSettings)
    fields = {name for kind in kinds for name in kind.model_fields}
    assert {name.upper() for name in fields} == SETTINGS


def test_every_variable_of_the_compose_stack_is_known_and_nothing_else() -> None:
    files = (".env.example", "docker-compose.yml", "make-secrets", "redis/start.sh", "redis/health.sh")
    text = "\n".join((DEPLOY / file).read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r"\bHEADRACE_([A-Z0-9_]+)", text)) - SETTINGS - OTHERS == DEPLOYMENT


def test_the_environment_of_a_compose_stack_causes_neither_an_error_nor_a_hint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not warnings_of(caplog, {"HEADRACE_VERSION": "0.1.0", "HEADRACE_TRAINER_GPUS": "0,1"})
    assert "HEADRACE_TRAINER_GPUS" not in warnings_of(caplog, {"HEADRACE_TRAINER_GPU": "0"})


def test_a_mistyped_variable_is_named_with_the_nearest_one_and_without_its_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = warnings_of(caplog, {"HEADRACE_REDIS_ULR": "redis://:canary@redis", "HEADRACE_PORT": "1", "PATH": "x"})
    assert said == ("HEADRACE_REDIS_ULR is ignored: no service of headrace reads it; did you mean HEADRACE_REDIS_URL?")
    said = warnings_of(caplog, {"HEADRACE_TYPO": "1"})
    assert said == "HEADRACE_TYPO is ignored: no service of headrace reads it"


def test_variables_of_other_services_and_of_kubernetes_are_not_errors(caplog: pytest.LogCaptureFixture) -> None:
    of_others = {"HEADRACE_REWARD_PATH": "/r", "HEADRACE_RUNS_DIR": "/r", "HEADRACE_SIMULATED_SEED": "1"}
    links = {
        "HEADRACE_REDIS_SERVICE_HOST": "10.0.0.1", "HEADRACE_REDIS_SERVICE_PORT_REDIS": "6379",
        "HEADRACE_REDIS_PORT": "tcp://10.0.0.1:6379", "HEADRACE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert not warnings_of(caplog, of_others | links)
    assert "did you mean HEADRACE_METRICS_PORT?" in warnings_of(caplog, {"HEADRACE_METRIC_PORT": "9"})


def test_the_simulated_generator_knows_its_own(caplog: pytest.LogCaptureFixture) -> None:
    said = warnings_of(caplog, {"HEADRACE_SIMULATED_SEDE": "1", "HEADRACE_SIMULATED_SEED": "1"}, simulated=("seed",))
    assert said.endswith("did you mean HEADRACE_SIMULATED_SEED?")
    assert said.count("is ignored") == 1
