"""The script's model and tokenizer: loads them when they are used, and copies trained weights into the model object.

A training changes only the weights in the services. The model object gets the newest checkpoint's weights when the
script uses it before the training has ended, and the final weights afterwards.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.run_inputs import RunInputs
from shared.errors import HeadraceError

_ADAPTER = "adapter_config.json"


class Weights(NamedTuple):
    """The weights that a run begins with: ``model``, or in ``source`` an adapter or checkpoint made from that model."""

    model: str
    source: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the run settings that load the weights of ``source``; empty without a ``source``."""
        return {} if self.source is None else {"resume_from_checkpoint": self.source, "resume_only_model": True}


class LiveModel:
    """A script's model, given by name or as an object, with its tokenizer and the weights of its training.

    Args:
        model: Hub id, directory, ``PreTrainedModel`` or ``PeftModel``.
        tokenizer: The tokenizer, if it is not the model's own.
        peft_config: A ``LoraConfig``, with which adapters are trained.
        init_kwargs: Arguments of ``from_pretrained``.

    Raises:
        ArgumentError: ``model`` has another type, or is a ``PeftModel`` with several adapters, with an adapter that was
            trained already, or with a ``peft_config`` beside it.
    """

    def __init__(self, model: Any, tokenizer: Any, *, peft_config: Any, init_kwargs: Mapping[str, Any]) -> None:
        self.peft_config = peft_config
        self._trained: Path | Callable[[], Path] | None = None
        self._checkpoint = ""
        self._so_far: Callable[[], Path | None] | None = None
        self._has: Path | None = None
        self._init_kwargs = init_kwargs
        self._given_tokenizer = tokenizer
        self._tokenizer = None if tokenizer is None else _with_pad_token(tokenizer)
        self._model: Any = None
        self._is_given = not isinstance(model, str)
        self._saved: str | None = None
        self.quantization_config: Any = None
        """How the weights of a model object were quantized when it was loaded; None if they were not."""
        if not self._is_given:
            self.name = _absolute(model)
            return
        if not hasattr(model, "save_pretrained"):
            raise ArgumentError(f"model is a {type(model).__name__}; give a hub id, a directory or a PreTrainedModel")
        self.name = str(model.config._name_or_path)  # noqa: SLF001 (transformers has no other name for it)
        self.quantization_config = getattr(model.config, "quantization_config", None)
        self._model = model
        if hasattr(model, "get_base_model"):
            if peft_config is not None:
                raise ArgumentError("model is a PeftModel, and peft_config is given too; give only one")
            self.peft_config = _config_of_new_adapter(model)

    @property
    def trained(self) -> Path | None:
        """Directory of the last training's weights, which the first access may download; None without a training."""
        if self._trained is not None and not isinstance(self._trained, Path):
            self._trained = self._trained()
        return self._trained

    @property
    def is_fetched(self) -> bool:
        """Whether the weights of the last training are on this machine."""
        return isinstance(self._trained, Path)

    @property
    def is_given(self) -> bool:
        """Whether the script gave the model as an object."""
        return self._is_given

    @property
    def is_unfinished(self) -> bool:
        """Whether a training is in progress or was interrupted."""
        return self._so_far is not None

    @property
    def so_far(self) -> Path | None:
        """Directory of the newest weights of a training that has not ended; None if there are none.

        Raises:
            HeadraceError: The training was interrupted, and has no checkpoint on this machine.
        """
        return None if self._so_far is None else self._so_far()

    @property
    def model(self) -> Any:
        """The model object, loaded if need be, with the last training's weights or, before its end, the newest ones.

        Raises:
            HeadraceError: The training was interrupted, and has no checkpoint on this machine.
        """
        so_far = self.so_far
        if so_far is None and self._has not in (None, self._trained):  # it has the weights of a run that was given up
            if self.trained is not None:
                self._use(self.trained)
            elif not self._is_given:
                self._model = self._has = None
        if self._model is None:
            from transformers import AutoModelForCausalLM

            auto: Any = AutoModelForCausalLM
            self._model = auto.from_pretrained(self.name, **{"dtype": "float32", **self._init_kwargs})
            if so_far is None and self.trained is not None:
                self._use(self.trained)
        if so_far is not None and so_far != self._has:
            self._use(so_far)
        self._adapt()
        return self._model

    def _adapt(self) -> None:
        """Add a new LoRA adapter to the model, if runs train an adapter and the model does not have it yet."""
        if self.peft_config is not None and not hasattr(self._model, "get_base_model"):
            import peft

            from services.trainer.policy.lora import outside_decoder

            adapting: Any = peft.get_peft_model
            config = copy.deepcopy(self.peft_config)  # PEFT writes into it
            config.target_modules = config.target_modules or "all-linear"  # as a run does
            config.exclude_modules = outside_decoder(self._model)
            self._model = adapting(self._model, config)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, or the model's own."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            auto: Any = AutoTokenizer
            sides = {"padding_side": "left", "truncation_side": "left"}  # as TRL loads it, for generate()
            self._tokenizer = _with_pad_token(auto.from_pretrained(self.name, **sides, **self._source()))
        return self._tokenizer

    def as_arguments(self) -> dict[str, Any]:
        """Return the callback arguments ``model`` and ``processing_class``. Each is None until it is loaded."""
        return {"model": self._model, "processing_class": self._tokenizer}

    def take(self, directory: Path | Callable[[], Path], *, checkpoint: str) -> None:
        """Use the weights in a run's model directory from now on, or weights that a function fetches when needed.

        Args:
            directory: The directory, or a function that returns it.
            checkpoint: The checkpoint with these weights, as ``RUN`` or ``RUN:STEP``.
        """
        self._trained, self._so_far, self._checkpoint = directory, None, checkpoint
        if self._model is not None and self.trained is not None:
            self._use(self.trained)

    def take_so_far(self, fetch: Callable[[], Path | None] | None) -> None:
        """Use the newest weights of a training that has not ended, whenever the model is asked for.

        A training never begins with them.

        Args:
            fetch: Returns the directory of these weights, or None if there are none yet. None instead of a function
                stops using such weights.
        """
        self._so_far = fetch

    def weights_for_run(self, inputs: Callable[[], RunInputs], *, evaluates: bool = False) -> Weights:
        """Return the weights that a new run begins with: the last training's or, without one, the given model's.

        Args:
            inputs: Returns the object that writes models for the services.
            evaluates: Whether the run only evaluates. It then begins with the exported model, also of an interrupted
                training. A run that trains begins with the last training's checkpoint, whose weights are float32.
        """
        if not evaluates and self._trained is not None:
            return Weights(self.given_for_run(inputs), self._checkpoint)
        found = (self.so_far or self.trained) if evaluates else None
        if found is None:
            return Weights(self.given_for_run(inputs))
        path = inputs().path(str(found))
        return Weights(self.given_for_run(inputs), path) if (found / _ADAPTER).exists() else Weights(path)

    def given_for_run(self, inputs: Callable[[], RunInputs]) -> str:
        """Return the name or directory by which the services find the model that the script gave.

        A model object, or a model with another tokenizer than its own, is written first, by the object that ``inputs``
        returns.
        """
        if self._saved is None:
            if self._is_given and self.quantization_config is None:
                self._saved = inputs().model(self._model, self.tokenizer, state=_state_without_adapter(self._model))
            elif self._given_tokenizer is None or is_own_tokenizer(self._given_tokenizer, self.name, **self._source()):
                self._saved = inputs().path(self.name) if os.path.isdir(self.name) else self.name
            else:
                directory = _local_directory(self.name, revision=self._init_kwargs.get("revision"))
                self._saved = inputs().with_tokenizer(directory, self._given_tokenizer)
        return self._saved

    def save(self, directory: Path) -> None:
        """Write the model object and its tokenizer to a directory. They are loaded first if need be."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def save_changes(self, directory: Path) -> None:
        """Write the tokenizer and generation settings, which a script may have changed, to a directory of weights.

        A tokenizer or model that the script has not loaded changes nothing in the directory.
        """
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(directory)
        generation = getattr(self._model, "generation_config", None)
        if generation is not None and not (directory / _ADAPTER).exists():
            with contextlib.suppress(ValueError):  # it has settings that contradict each other
                generation.save_pretrained(directory)

    def _source(self) -> dict[str, Any]:
        """Return ``revision`` and ``trust_remote_code`` of a model given by name, to load its tokenizer; else empty."""
        if self._is_given:
            return {}
        return {
            name: self._init_kwargs[name] for name in ("revision", "trust_remote_code") if name in self._init_kwargs
        }

    def _use(self, directory: Path) -> None:
        """Copy the weights or the adapter in a directory into the model object."""
        if (directory / _ADAPTER).exists():
            import peft

            self._adapt()
            adapters: Any = peft
            weights = adapters.load_peft_weights(str(directory), device="cpu")
            missing = adapters.set_peft_model_state_dict(self._model, weights).unexpected_keys
            if missing:
                raise HeadraceError(
                    f"the adapter in {directory} has weights that the model has no place for, such as {missing[0]}: "
                    "load it with PeftModel.from_pretrained"
                )
        else:
            trained = cast("Any", type(self._model)).from_pretrained(directory)
            self._model.load_state_dict(trained.state_dict())
        self._has = directory


def _with_pad_token(tokenizer: Any) -> Any:
    """Set a missing pad token to the end-of-sequence token, as TRL does, and return the tokenizer."""
    if getattr(tokenizer, "pad_token", "") is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _absolute(name: str) -> str:
    directory = Path(name).expanduser()
    return str(directory.resolve()) if os.path.isdir(directory) else name


def own_tokenizer(model: Any) -> Any:
    """Load the tokenizer of a model object, by the name that the model was loaded from."""
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    return auto.from_pretrained(model.config._name_or_path)  # noqa: SLF001  transformers has no other name for it


def is_own_tokenizer(tokenizer: Any, model: str, **source: Any) -> bool:
    """Return whether a tokenizer has the vocabulary, chat template, and bos and eos token of the model's own tokenizer.

    ``source`` has arguments of ``from_pretrained`` for the model's own tokenizer. If this cannot be loaded, the result
    is False.
    """
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    try:
        own: Any = auto.from_pretrained(model, **source)
    except (OSError, ValueError):
        return False
    return all(
        getattr(tokenizer, name, None) == getattr(own, name, None)
        for name in ("chat_template", "eos_token", "bos_token", "vocab_size")
    ) and bool(tokenizer.get_vocab() == own.get_vocab())


def _local_directory(name: str, *, revision: str | None) -> Path:
    """Return the directory of a model, which is downloaded from the hub if need be."""
    if os.path.isdir(name):
        return Path(name)
    import huggingface_hub

    hub: Any = huggingface_hub
    return Path(hub.snapshot_download(name, revision=revision))


def _config_of_new_adapter(model: Any) -> Any:
    """Return the configuration of a PeftModel's adapter, which must be its only one and not trained yet.

    Raises:
        ArgumentError: The model has several adapters, or its adapter was trained already.
    """
    name, *others = model.peft_config
    if others:
        raise ArgumentError(
            f"model has the adapters {', '.join(model.peft_config)}, and a run trains one: delete the others "
            f"(model.delete_adapter({others[0]!r}))"
        )
    if any(bool(weights.any()) for key, weights in model.named_parameters() if "lora_B" in key):
        raise ArgumentError(
            "model has an adapter that was trained already, and a run begins with a new one: merge it first "
            "(model.merge_and_unload()), and give peft_config"
        )
    return model.peft_config[name]


def _state_without_adapter(model: Any) -> dict[str, Any] | None:
    """Return the weights of a PeftModel's base model under the base model's names; None for another model."""
    if not hasattr(model, "get_base_model"):
        return None
    state = model.get_base_model().state_dict()
    return {name.replace(".base_layer", ""): weights for name, weights in state.items() if ".lora_" not in name}
