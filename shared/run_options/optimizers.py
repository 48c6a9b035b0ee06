"""The optimizers of a run under transformers' names, and the arguments that each takes in ``optim_args``.

The trainer's optimizer.py makes them. Muon is torch's; transformers does not offer it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Optimizer = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adafactor",
    "muon",
    "sgd",
    "rmsprop",
    "adagrad",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_8bit",
    "lion_32bit",
    "paged_lion_8bit",
    "paged_lion_32bit",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "paged_ademamix_32bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
]
OptimArgument = float | int | bool | str
_Kind = type[float] | type[int] | type[bool] | tuple[str, ...]
_SWITCHES: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_BELOW: Final[Mapping[str, float]] = {"ns_steps": 100, "beta3": 1}
"""Limits that torch and bitsandbytes set to their arguments."""
_BETAS: Final = ("adam_beta1", "adam_beta2")
_ADAM: Final = (*_BETAS, "adam_epsilon")
ADAM_OPTIONS: Final = _ADAM
_BITSANDBYTES: Final = "bitsandbytes"


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about one optimizer: its memory per parameter, its settings and arguments, and the package it needs."""

    moment_bytes: int
    """Bytes of state per trained parameter, before those that the function `moment_bytes` adds for arguments."""
    adam_options: tuple[str, ...]
    """The options among ADAM_OPTIONS that it uses."""
    arguments: Mapping[str, _Kind]
    """Names in ``optim_args`` to their type, or to the words that are allowed."""
    why_one_rank: str = ""
    """Why several ranks cannot share its state; empty if they can."""
    package: str = ""
    """The package that it comes from, besides torch and transformers."""


def _of_bitsandbytes(
    num_moments: int, bits: int, *, adam_options: tuple[str, ...] = (), arguments: Mapping[str, _Kind] | None = None
) -> OptimizerFacts:
    return OptimizerFacts(
        num_moments * bits // 8,
        adam_options,
        arguments or {},
        why_one_rank="bitsandbytes keeps its moments in blocks of a whole matrix",
        package=_BITSANDBYTES,
    )


_MOMENTUM: Final[Mapping[str, _Kind]] = {"momentum": float, "nesterov": bool}
_OF_RMSPROP: Final[Mapping[str, _Kind]] = {"momentum": float, "alpha": float, "eps": float}
_OF_ADEMAMIX: Final[Mapping[str, _Kind]] = {"beta3": float, "alpha": float, "t_alpha": int, "t_beta3": int}
_ADAMW = OptimizerFacts(8, _ADAM, {})
_ADAMW_8BIT = _of_bitsandbytes(2, 8, adam_options=_ADAM)
_LION_8BIT, _LION = (_of_bitsandbytes(1, bits, adam_options=_BETAS) for bits in (8, 32))
_ADEMAMIX_8BIT, _ADEMAMIX = (_of_bitsandbytes(3, bits, adam_options=_ADAM, arguments=_OF_ADEMAMIX) for bits in (8, 32))
_RMSPROP_8BIT, _RMSPROP = (_of_bitsandbytes(1, bits, arguments=_OF_RMSPROP) for bits in (8, 32))

FACTS: Final[Mapping[Optimizer, OptimizerFacts]] = {
    "adamw_torch_fused": _ADAMW,
    "adamw_torch": _ADAMW,
    "adafactor": OptimizerFacts(0, (), {}, why_one_rank="it keeps sums over the rows and columns of a whole matrix"),
    "muon": OptimizerFacts(
        4,
        _ADAM,
        {**_MOMENTUM, "ns_steps": int, "adjust_lr_fn": ("match_rms_adamw", "original")},
        why_one_rank="it makes whole matrices orthogonal",
    ),
    "sgd": OptimizerFacts(0, (), {**_MOMENTUM, "dampening": float}),
    "rmsprop": OptimizerFacts(4, (), {**_OF_RMSPROP, "centered": bool}),
    "adagrad": OptimizerFacts(4, (), {"lr_decay": float, "eps": float}),
    "adamw_8bit": _ADAMW_8BIT,
    "adamw_bnb_8bit": _ADAMW_8BIT,
    "paged_adamw_8bit": _ADAMW_8BIT,
    "paged_adamw_32bit": _of_bitsandbytes(2, 32, adam_options=_ADAM),
    "lion_8bit": _LION_8BIT,
    "lion_32bit": _LION,
    "paged_lion_8bit": _LION_8BIT,
    "paged_lion_32bit": _LION,
    "ademamix": _ADEMAMIX,
    "ademamix_8bit": _ADEMAMIX_8BIT,
    "paged_ademamix_8bit": _ADEMAMIX_8BIT,
    "paged_ademamix_32bit": _ADEMAMIX,
    "rmsprop_bnb": _RMSPROP,
    "rmsprop_bnb_8bit": _RMSPROP_8BIT,
    "rmsprop_bnb_32bit": _RMSPROP,
}


def parse_optim_args(optim: Optimizer, text: str) -> dict[str, OptimArgument]:
    """Parse ``optim_args`` in transformers' form, such as ``momentum=0.9, nesterov=true``.

    Raises:
        ValueError: The text has another form, or an argument or a value that the optimizer does not take.
    """
    kinds = FACTS[optim].arguments
    arguments: dict[str, OptimArgument] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if not name or not equals or not value:
            raise ValueError(f"{part!r} is not NAME=VALUE; write momentum=0.9,nesterov=true")
        if name not in kinds:
            raise ValueError(f"{optim} does not take {name}; {_instead(name, kinds)}")
        if name in arguments:
            raise ValueError(f"{name} is given twice")
        arguments[name] = _argument(name, value, kinds[name])
    return arguments


def moment_bytes(optim: Optimizer, arguments: Mapping[str, OptimArgument]) -> int:
    """Return the bytes of an optimizer's state for each trained parameter.

    Adafactor's sums are not counted, because they are one number for each row and column of a matrix. Muon's second
    moment of the embeddings is not counted either.
    """
    has_momentum = bool(arguments.get("momentum")) and optim in ("sgd", "rmsprop")
    return FACTS[optim].moment_bytes + 4 * has_momentum + 4 * bool(arguments.get("centered"))


def _instead(name: str, kinds: Mapping[str, _Kind]) -> str:
    own = {"lr": "learning_rate", "beta1": "adam_beta1", "beta2": "adam_beta2", "betas": "adam_beta1 and adam_beta2"}
    own |= {"eps": "adam_epsilon", "weight_decay": "weight_decay"}
    if name in own:
        return f"set {own[name]}"
    return f"it takes {', '.join(kinds)}" if kinds else "it takes no arguments here; leave optim_args out"


def _argument(name: str, value: str, kind: _Kind) -> OptimArgument:
    if isinstance(kind, tuple):
        if value not in kind:
            raise ValueError(f"{name} must be {' or '.join(kind)}, and is {value!r}")
        return value
    if kind is bool:
        if value.lower() not in _SWITCHES:
            raise ValueError(f"{name} must be true or false, and is {value!r}")
        return _SWITCHES[value.lower()]
    try:
        number = kind(value)
    except ValueError:
        number = None
    limit = _BELOW.get(name, math.inf)
    if number is None or not 0 <= number < limit:
        below = f" and below {limit:g}" if limit < math.inf else ""
        raise ValueError(f"{name} must be a {'whole ' * (kind is int)}number of at least 0{below}, and is {value!r}")
    return number
