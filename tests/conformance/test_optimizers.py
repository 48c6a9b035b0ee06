"""Steps equal those of transformers' Trainer, TRL's base class, for every optimizer that both have."""

import importlib
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from services.trainer.policy.optimizers.optimizer import make_optimizer
from shared.run_options.optimizers import FACTS, Optimizer
from tests.conformance.conftest import Models
from tests.trainer.cores import make_config

STEPS = 3
ARGUMENTS: dict[str, str] = {
    "sgd": "momentum=0.9, nesterov=true",
    "rmsprop": "momentum=0.5, alpha=0.9, eps=1e-6, centered=yes",
    "adagrad": "lr_decay=0.1, eps=1e-6",
    "ademamix": "alpha=4.0, beta3=0.999, t_alpha=10, t_beta3=10",
}
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1}
FOR_ADAM: dict[str, Any] = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
OFFERED_BY_BOTH: list[Optimizer] = [name for name in get_args(Optimizer) if name != "muon"]
CASES = [(name, None) for name in OFFERED_BY_BOTH] + [
    (name, ARGUMENTS[name]) for name in OFFERED_BY_BOTH if name in ARGUMENTS
]


def trained(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Make a few steps with gradients that depend only on the step, and return the weights."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load(model: Path) -> Any:
    return cast(Any, AutoModelForCausalLM).from_pretrained(model)


def forget_overrides(package: str) -> None:
    """Make bitsandbytes forget which weights of an earlier model have moments of 32 bits."""
    if package:
        optim: Any = importlib.import_module(f"{package}.optim")
        optim.GlobalOptimManager.get_instance().initialize()


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize(("optim", "optim_args"), CASES)
def test_the_steps_of_an_optimizer_are_those_of_transformers(
    models: Models, tmp_path: Path, optim: Optimizer, optim_args: str | None
) -> None:
    facts = FACTS[optim]
    forget_overrides(facts.package)
    options = {**SETTINGS, **{name: FOR_ADAM[name] for name in facts.adam_options}}
    if optim_args:
        options["optim_args"] = optim_args
    ours, theirs = load(models.start), load(models.start)
    ends = [end.weight for end in (ours.get_input_embeddings(), ours.get_output_embeddings())]
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", optim=optim, **options)
    trainer: Any = Trainer(model=theirs, args=args)
    expected = trained(theirs, trainer.create_optimizer())
    forget_overrides(facts.package)
    config = make_config(models.start, optim=optim, **options)
    moved = trained(ours, make_optimizer(dict(ours.named_parameters()), config, ends=ends))
    assert [name for name in expected if not torch.equal(moved[name], expected[name])] == []
    start = dict(load(models.start).named_parameters())
    assert [name for name in start if torch.equal(moved[name], start[name])] == []


def test_the_names_are_those_of_transformers() -> None:
    assert set(OFFERED_BY_BOTH) <= {name.value for name in OptimizerNames}
