"""The names that users import from headrace are offered by completion."""

import pytest

import headrace

pytestmark = pytest.mark.unit


def test_the_names_to_import_are_listed() -> None:
    assert {"GRPOTrainer", "GRPOConfig", "Client"} <= {*dir(headrace)}
