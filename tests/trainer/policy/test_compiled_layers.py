"""torch.compile changes neither losses nor gradients, and does not compile again for passes of other sizes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.policy.policy_core import PolicyCore
from shared.errors import UserError
from tests.trainer.cores import make_core, random_rows

pytestmark = [
    # Of torch itself, when it traces and generates code.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:The distutils package is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo: Any = torch
    # Read at each compilation. A machine whose vLLM runs on CPU may have it set.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    dynamo._dynamo.reset()
    dynamo._dynamo.utils.counters.clear()


def accumulated(model: Path, *, backend: str | None, **settings: Any) -> tuple[PolicyCore, float]:
    """Return a core with the gradients of two batches, and its loss."""
    compiled: dict[str, Any] = {}
    if backend is not None:
        compiled = {"torch_compile": True, "torch_compile_backend": backend}
    core = make_core(model, **compiled, **settings)
    losses = [core.accumulate(random_rows(count, seed=count)).token_stats.loss for count in (6, 3)]
    return core, sum(losses)


def gradients(core: PolicyCore) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in core.lm.named_parameters() if weight.grad is not None}


def assert_alike(plain: tuple[PolicyCore, float], compiled: tuple[PolicyCore, float]) -> None:
    assert compiled[1] == pytest.approx(plain[1], rel=1e-5)
    expected, found = gradients(plain[0]), gradients(compiled[0])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    plain[0].step()
    compiled[0].step()
    rows = random_rows(4, seed=9)
    for mine, theirs in zip(compiled[0].score(rows), plain[0].score(rows), strict=True):
        assert mine.trainer_logprobs == pytest.approx(theirs.trainer_logprobs, abs=1e-4)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": True},
    {"use_peft": True, "lora_r": 4},
    {"packing": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=[" ".join(settings) or "plain" for settings in SETTINGS])
def test_compiled_layers_have_the_losses_and_gradients_of_plain_ones(
    tiny_model: Path, settings: dict[str, Any]
) -> None:
    settings = {"learning_rate": 1e-3, **settings}
    assert_alike(
        accumulated(tiny_model, backend=None, **settings), accumulated(tiny_model, backend="aot_eager", **settings)
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="apt-get install g++")
def test_code_of_the_inductor_has_them_too(tiny_model: Path) -> None:
    plain = accumulated(tiny_model, backend=None, learning_rate=1e-3)
    assert_alike(plain, accumulated(tiny_model, backend="inductor", learning_rate=1e-3))


def test_passes_of_other_sizes_use_the_graphs_of_the_first_ones(tiny_model: Path) -> None:
    core, _ = accumulated(tiny_model, backend="eager")
    dynamo: Any = torch
    counters = dynamo._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    assert before > 0, "the layers were compiled"
    for count in (2, 5, 7, 11):
        core.accumulate(random_rows(count, seed=count))
    assert counters["unique_graphs"] == before


def test_names_of_weights_stay_as_they_are(tiny_model: Path) -> None:
    plain, compiled = make_core(tiny_model), make_core(tiny_model, torch_compile=True, torch_compile_backend="eager")
    assert [name for name, _ in compiled.named_weights()] == [name for name, _ in plain.named_weights()]


def test_a_backend_that_does_not_exist_is_refused_with_one_that_does(tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"does not work here with the backend nosuch: .* torch_compile_backend: aot_"):
        make_core(tiny_model, torch_compile=True, torch_compile_backend="nosuch")
