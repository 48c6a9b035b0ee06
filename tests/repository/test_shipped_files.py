"""Shipped files fit the code: run files can be parsed, and the page of settings is up to date."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_there_are_example_run_files() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_run_file_is_accepted(path: Path) -> None:
    parse_run_config(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "maker",
    ["make_run_file_page", "make_trl_page", "make_metrics_page", "make_watching_page", "make_settings_page"],
)
def test_a_page_that_is_made_from_code_says_what_the_code_says(maker: str) -> None:
    spec = importlib.util.spec_from_file_location(maker, ROOT / "docs" / f"{maker}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), f"run: python docs/{maker}.py"
