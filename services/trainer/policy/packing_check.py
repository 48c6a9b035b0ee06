"""Tests whether a loaded model computes correct logprobs, also if several rows are packed into one pass.

    reference:         the model's own forward, with all of its logits  --+
    one row per pass:  | row |, | other row |                           --+--> equal, or the model is refused
    packed:            | row | other row |                              --+--> equal, or one row per pass from now on

A model's own metadata is not enough: convolutions and recurrences run across rows, masks are built in many ways, logits
are scaled under many names, and a mistake gives wrong numbers instead of an error. Therefore two short random rows go
through the model in each way. During the test, attention windows and chunks are made smaller than the rows.
"""

import contextlib
import logging
from collections.abc import Generator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from services.trainer.policy.microbatches import TrainRow, pack_rows
from services.trainer.policy.policy_module import PolicyModule
from services.trainer.policy.row_pass import compute
from services.trainer.policy.varlen_attention import NotPackableError
from shared.errors import UserError

log = logging.getLogger(__name__)

_LENGTHS = (13, 13, 19)
_WINDOW = 5
_WINDOWS = ("sliding_window", "attention_chunk_size")
_EXACT, _ROUNDED = 1e-3, 0.2
"""Largest accepted difference between a row's logprobs, in standard deviations of its logprobs: at any token in
float32, at the median token if weights are rounded to bfloat16. Attending across rows, or past a window, gives 0.1 to
2; rounding gives 1e-5 in float32."""

Logprobs = npt.NDArray[np.float64]


def settle_packing(module: PolicyModule, *, device: torch.device, is_rounded: bool, packing: bool) -> None:
    """Turn packing off, or fused attention, if it changes the logprobs of this module, and log a warning.

    With several ranks, call it on all of them: each makes the same passes and comes to the same result.

    Args:
        module: The policy, ready to compute.
        device: The module's device.
        is_rounded: Whether the module's weights are rounded to bfloat16, so that results cannot agree exactly.
        packing: Whether the run asks for packing; if not, packing is turned off.

    Raises:
        UserError: A single row gives other logprobs than the model's own forward, or NaN or infinite ones.
    """
    exact = not is_rounded and module.can_compute_exactly
    tolerance = _EXACT if exact else _ROUNDED
    with torch.no_grad(), _small_windows(module.lm), module.exactly() if exact else contextlib.nullcontext():
        with module.plain_attention():
            own = _alone(module, device, by_the_model_itself=True)
        if not all(np.isfinite(logprobs).all() for logprobs in own):
            name = module.lm.config.name_or_path
            raise UserError(f"the weights of {name} give logprobs that are NaN or infinite", field="model")
        reason = _why_not_packable(module, own, device, tolerance) if packing else None
        if not packing or reason is not None:
            _settle_alone(module, own, device, tolerance)
    name = type(module.lm).__name__
    if module.packs and exact and device.type == "cuda":
        # The exact check does not cover the GPU's fused attention, which is checked separately here.
        with torch.no_grad(), _small_windows(module.lm):
            doubt = _why_not_packable(module, own, device, _ROUNDED)
        if doubt is not None:
            module.attend_row_by_row()
            log.warning("%s attends row by row: with fused attention %s. This is correct, but slower", name, doubt)
    if reason is not None:
        log.warning(
            "%s is trained with one rollout per pass, without packing: %s. This is correct, but slower", name, reason
        )


def _settle_alone(module: PolicyModule, own: list[Logprobs], device: torch.device, tolerance: float) -> None:
    """Turn packing off, and choose the first attention that gives the model's own logprobs on single rows.

    transformers' sdpa is wrong for capped scores. Raises UserError if no attention fits.
    """
    difference = np.inf
    for attention in module.attentions():
        module.pack_no_more(attention)
        with contextlib.suppress(NotPackableError):
            difference = _difference(own, _alone(module, device), tolerance)
            if difference <= tolerance:
                return
    raise UserError(
        f"{type(module.lm).__name__} changes its logits in an unknown way: its logprobs differ from the model's own by "
        f"{difference:.2g} standard deviations, so it cannot be trained",
        field="model",
    )


def _why_not_packable(module: PolicyModule, own: list[Logprobs], device: torch.device, tolerance: float) -> str | None:
    rows = _random_rows(module)
    try:
        packed = _logprobs(module, rows, tuple(range(len(rows))), device)
    except NotPackableError as error:
        return str(error)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"its code does not accept packed rows ({type(error).__name__}: {error})"
    difference = _difference(own, np.split(packed, np.cumsum([row.size for row in own])[:-1]), tolerance)
    if not difference <= tolerance:  # also true for NaN
        return f"its logprobs differ by {difference:.2g} standard deviations on packed rows"
    return None


def _difference(own: list[Logprobs], other: list[Logprobs], tolerance: float) -> float:
    worst = np.max if tolerance == _EXACT else np.median
    pairs = zip(own, other, strict=True)
    return float(max(worst(np.abs(left - right)) / max(left.std(), 1e-9) for left, right in pairs))


def _alone(module: PolicyModule, device: torch.device, *, by_the_model_itself: bool = False) -> list[Logprobs]:
    rows = _random_rows(module)
    return [_logprobs(module, rows, (index,), device, by_the_model_itself) for index in range(len(rows))]


def _random_rows(module: PolicyModule) -> list[TrainRow]:
    rng = np.random.default_rng(0)
    vocab_size = module.lm.config.get_text_config().vocab_size
    return [
        TrainRow(
            token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=np.array([0] + [1] * (length - 1), dtype=np.uint8),
            generator_logprobs=np.zeros(length - 1, dtype=np.float32),
            advantage=0.0,
        )
        for length in _LENGTHS
    ]


def _logprobs(
    module: PolicyModule,
    rows: list[TrainRow],
    row_indices: tuple[int, ...],
    device: torch.device,
    by_the_model_itself: bool = False,
) -> Logprobs:
    microbatch = pack_rows(rows, row_indices)
    logprobs_M, *_ = compute(module, microbatch, device=device, by_the_model_itself=by_the_model_itself)
    logprobs: Logprobs = logprobs_M.double().cpu().numpy()
    return logprobs


@contextlib.contextmanager
def _small_windows(lm: Any) -> Generator[None]:
    """Within the block, limit all attention windows and chunks of the model to 5 tokens, fewer than a test row has."""
    before: list[tuple[Any, str, int]] = []
    for owner in (lm.config.get_text_config(), *lm.modules()):
        for name in _WINDOWS:
            value = cast("dict[str, Any]", vars(owner)).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > _WINDOW:
                before.append((owner, name, value))
                setattr(owner, name, _WINDOW)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
