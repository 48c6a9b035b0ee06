"""Every method of TRL's trainer is one of headrace's too, or a subclass that overrides it is refused."""

import inspect
from typing import Any

import pytest

from headrace.grpo.grpo_trainer import GRPOTrainer
from tests.conformance.oracle import trl

_TRLS: type[object] = trl.GRPOTrainer
_METHODS = [name for name, value in vars(_TRLS).items() if inspect.isroutine(value)]


@pytest.mark.parametrize("name", [name for name in _METHODS if name not in vars(GRPOTrainer)])
def test_a_subclass_cannot_override_a_method_that_only_trls_training_calls(name: str) -> None:
    def override(*_: Any) -> None: ...

    with pytest.raises(ValueError, match=f"Mine.{name} would never be called: "):
        type("Mine", (GRPOTrainer,), {name: override})


def test_the_methods_of_both_are_those_that_a_script_calls() -> None:
    assert {name for name in _METHODS if name in vars(GRPOTrainer)} == {"__init__", "log"}
