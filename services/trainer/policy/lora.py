"""LoRA (arXiv 2106.09685) through PEFT: a frozen base, and two small trained matrices beside linear layers.

    x --+--W (frozen, in the run's dtype)-----------------+--> W x + (alpha / r) B (A x)
        +--A (r x in, float32)--> --B (out x r, float32)--+

B starts at 0, so policy version 0 is the base itself. Only adapters are trained, pushed, saved in checkpoints and
exported, with the names of PEFT's files. At every start, the base is loaded from the run's ``model``. The reference of
the KL term is the same model with its adapters off, so no second copy exists.

The last projection and the embeddings get no adapters: the projection is fused with the loss (linear_logprobs.py) and
never runs as a layer.
"""

import contextlib
import hashlib
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.trainer.checkpoints.tensor_file import write_tensors
from services.trainer.policy.policy_module import PolicyModule
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

BASE_HASH, OLDER_BASE_HASH = "base_in_bfloat16", "base"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_NAME = "default"
_IN_FILES = "base_model.model."
_OWN = re.compile(rf"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.{_NAME}\.weight")
_SAMPLED = 64
"""Number of elements of each weight that go into the fingerprint of a base."""


def add_adapters(lm: Any, config: RunConfig) -> None:
    """Freeze a transformers model and add adapters to its layers, initialised only from the run's seed.

    A model on the meta device gets adapters on the meta device.

    Raises:
        UserError: ``lora_target_modules`` names anything but a linear layer of the model, or the model has none.
    """
    from peft import inject_adapter_in_model

    targets = _targets(lm, config.lora_target_modules)
    described = lora_config(config, targets)
    described.exclude_modules = outside_decoder(lm)
    is_meta = next(cast(nn.Module, lm).parameters()).is_meta
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(config.seed)
    try:
        inject_adapter_in_model(described, lm, adapter_name=_NAME, low_cpu_mem_usage=is_meta)
    except ValueError as error:
        raise UserError(f"PEFT cannot put adapters into this model: {error}", field="lora_target_modules") from error
    finally:
        torch.set_rng_state(before)
    for parameter in adapters(lm).values():
        parameter.data = parameter.data.float()  # PEFT creates them in the base's dtype
    lm.peft_config[_NAME].target_modules = targets  # PEFT made it a set, whose order would vary in the files
    cast(nn.Module, lm).eval()


def lora_config(config: RunConfig, targets: list[str]) -> Any:
    """Return the run's PEFT ``LoraConfig`` for layers with these names."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        base_model_name_or_path=config.model,
        revision=config.model_revision,
        task_type="CAUSAL_LM",
    )


def has_adapters(lm: Any) -> bool:
    """Whether `add_adapters` was called on the model."""
    return bool(getattr(lm, "peft_config", None))


def adapters(lm: Any) -> dict[str, Tensor]:
    """Return the live parameters of the adapters in fixed order, by their names in PEFT's files."""
    return {name: parameter for own, parameter in lm.named_parameters() if (name := file_name(own)) is not None}


def file_name(own: str) -> str | None:
    """Return a parameter's name in PEFT's files; None if it does not belong to an adapter."""
    match = _OWN.fullmatch(own)
    return None if match is None else f"{_IN_FILES}{match['layer']}.{match['matrix']}.weight"


def pushed_adapters(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters among the model's tensors, under the names by which the generators load them.

    These are the names in PEFT's files, with one exception. If the model is the text part of a larger checkpoint,
    transformers removes a prefix from the names of its layers. vLLM serves the whole checkpoint, and keeps the prefix.
    """
    from transformers import core_model_loading

    loading: Any = core_model_loading  # partly untyped
    loaded: list[Any] = getattr(lm, "_weight_conversions", None) or []
    prefixes = [one.reverse_transform() for one in reversed(loaded) if isinstance(one, loading.PrefixChange)]

    def in_checkpoint(own: str) -> str:
        for prefix in prefixes:
            own, _ = prefix.rename_source_key(own)
        return own

    return {name: tensor for own, tensor in tensors.items() if (name := file_name(in_checkpoint(own))) is not None}


def write_adapters(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the adapters to ``adapter_model.safetensors`` in the directory.

    Raises:
        OSError: The file could not be written.
    """
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(directory / WEIGHTS_FILE, whole, header={"format": "pt"})


def describe_adapters(lm: Any, tokenizer: Any | None, directory: Path) -> None:
    """Write the adapters' config and, if given, the tokenizer to the directory: loading needs them beside the weights.

    Raises:
        OSError: A file could not be written.
    """
    described: Any = lm.peft_config[_NAME]
    trains, described.inference_mode = described.inference_mode, True
    try:
        described.save_pretrained(directory)
    finally:
        described.inference_mode = trains
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def dropping(lm: Any, share: float) -> Generator[None]:
    """Within the block, apply dropout with rate ``share`` to the adapters' inputs.

    A backward pass that recomputes activations belongs inside too. Dropout is off everywhere else, so that the logprobs
    compared with the generator's come from the same network.
    """
    dropouts = _dropouts(lm) if share else []
    for dropout in dropouts:
        dropout.p, dropout.training = share, True
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.p, dropout.training = 0.0, False


class BaseReference:
    """The reference model of a LoRA run: the policy with its adapters off."""

    def __init__(self, module: PolicyModule) -> None:
        self._module = module

    @contextlib.contextmanager
    def scoring(self) -> Generator[PolicyModule]:
        """Yield the policy's module, with all adapters off within the block."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers: list[Any] = [layer for layer in self._module.modules() if isinstance(layer, BaseTunerLayer)]
        # PEFT's enable_adapters() would also turn requires_grad off and on, and FSDP may look at it in between.
        for layer in layers:
            layer._disable_adapters = True  # noqa: SLF001
        try:
            yield self._module
        finally:
            for layer in layers:
                layer._disable_adapters = False  # noqa: SLF001

    def after_step(self, policy: PolicyModule, num_steps: int) -> None:
        """Do nothing: the base never changes."""


def base_hashes(lm: Any) -> dict[str, int]:
    """Return two fingerprints of the frozen base for a checkpoint: in bfloat16, and in the dtype it was loaded in.

    Checkpoints of earlier releases have only the second.
    """
    return {BASE_HASH: fingerprint(lm), OLDER_BASE_HASH: fingerprint(lm, dtype=None)}


@torch.no_grad()
def fingerprint(lm: Any, *, dtype: torch.dtype | None = torch.bfloat16) -> int:
    """Return a 48-bit hash of the base's weight names, shapes and first elements; 0 for a model without weights.

    Args:
        lm: The model, with or without adapters.
        dtype: Hash floating-point elements in this dtype, in which bases that were loaded in float32 and in bfloat16
            are the same; None hashes them as they were loaded.
    """
    parameters = [(name, weight) for name, weight in lm.named_parameters() if file_name(name) is None]
    if any(weight.is_meta for _, weight in parameters):
        return 0
    seen = hashlib.sha256(repr([(_plain(name), tuple(weight.shape)) for name, weight in parameters]).encode())
    for _, weight in parameters:
        first: Tensor = weight.detach().flatten()[:_SAMPLED].contiguous()
        if dtype is not None and first.is_floating_point():
            first = first.to(dtype)
        seen.update(first.view(torch.uint8).cpu().numpy().tobytes())
    return int.from_bytes(seen.digest()[:6], "big")


def linear_layers(lm: Any) -> set[str]:
    """Return the names of the layers that can have adapters: linear ones of the decoder, not the last projection."""
    prefix = _decoder_prefix(lm)
    return {name for name in _all_linear(lm) if name.startswith(prefix)}


def outside_decoder(lm: Any) -> str | None:
    """Return PEFT's ``exclude_modules`` for adapters of the language model only; None if all linear layers are its own.

    It is a pattern, because other layers, such as those of a vision tower, may have the same names.
    """
    if _all_linear(lm) == linear_layers(lm):
        return None
    return rf"(?!{re.escape(_decoder_prefix(lm))}).*"


def beside_text(lm: Any) -> list[Tensor]:
    """Return the parameters beside the decoder and its embeddings, such as those of a vision tower.

    Text does not pass through them. transformers' Trainer does not change them: they have no gradient, and so its
    optimizers skip them.
    """
    if outside_decoder(lm) is None:
        return []
    prefix = _decoder_prefix(lm)
    ends = {id(end.weight) for end in (lm.get_input_embeddings(), lm.get_output_embeddings())}
    return [it for name, it in lm.named_parameters() if not name.startswith(prefix) and id(it) not in ends]


def _all_linear(lm: Any) -> set[str]:
    head = lm.get_output_embeddings()
    return {
        name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and name and module is not head
    }


def _decoder_prefix(lm: Any) -> str:
    """Return the prefix of the names of the decoder's layers, such as ``model.``; empty if it is ``lm``."""
    decoder = lm.get_decoder()
    if decoder is lm.get_output_embeddings():  # that is the name of the head in ModernBERT's decoder
        return ""
    return next((f"{name}." for name, module in lm.named_modules() if name and module is decoder), "")


def _targets(lm: Any, wanted: list[str] | None) -> list[str]:
    """Return the names, such as ``q_proj``, of the layers that get adapters: ``wanted``, or all of the decoder's."""
    layers = linear_layers(lm)
    names = sorted({name.rpartition(".")[2] for name in layers})
    if not names:
        raise UserError(f"{type(lm).__name__} has no linear layers for adapters; leave use_peft out", field="use_peft")
    unmatched = [
        target for target in wanted or () if not any(name == target or name.endswith(f".{target}") for name in layers)
    ]
    if unmatched:
        raise UserError(
            f"no linear layer of this model is named {' or '.join(unmatched)}; its layers are {', '.join(names)}. "
            "Leave lora_target_modules out to give an adapter to each of them",
            field="lora_target_modules",
        )
    return sorted(wanted or names)


def _dropouts(lm: Any) -> list[nn.Dropout]:
    return [
        module
        for name, module in lm.named_modules()
        if isinstance(module, nn.Dropout) and name.endswith(f".lora_dropout.{_NAME}")
    ]


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")
