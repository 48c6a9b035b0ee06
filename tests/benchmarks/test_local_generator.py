"""Services accept the key of the benchmarks, which would otherwise fail only when somebody runs them."""

import pytest

from benchmarks import local_generator
from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings

pytestmark = pytest.mark.unit


def test_services_accept_the_key_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_API_KEY", "HEADRACE_INTERNAL_KEY"):
        monkeypatch.setenv(name, local_generator.KEY)
    for settings in (GeneratorSettings(), RewarderSettings()):
        assert settings.api_key.get_secret_value() == local_generator.KEY
