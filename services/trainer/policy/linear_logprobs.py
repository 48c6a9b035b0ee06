"""Computes log-probabilities and entropies from hidden states: the last projection fused with its softmax, in tiles.

    hidden_MH, weight_VH --> tile of logits (positions x vocabulary) --> running sums --> logprobs_M, entropies_M
                                    |
                                    +-- the backward pass computes the tile again, then replaces it by the gradient

Logits exist one tile at a time, never as ``M x V``. Sums are at least float32, whatever the inputs' dtype; products of
bfloat16 numbers are accumulated in float32. The model's scale and cap of its logits and the sampling temperature are
included, so that the result is comparable with the generator's logprobs. The other sampling settings (top_p, top_k,
min_p, repetition_penalty) are left out, as in TRL. If they are set, the generator's logprobs belong to the truncated
distribution, and the importance ratio shows the difference.

    M  sampled positions       H  hidden size       V  vocabulary       RU  positions and vocabulary of a tile
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

TILE_ROWS = {"cpu": 512, "cuda": 4096}
TILE_VOCABULARY = {"cpu": 4096, "cuda": 4096}
"""Size of a tile: 8 MiB of float32 on a CPU, 64 MiB on a GPU. At most two tiles exist at a time.

Measured on one core of an AMD EPYC with 2 MiB of cache, 1024 positions, hidden size 512, vocabulary 32,768, forward
and backward: 1.9 s at 512 x 4096, 2.4 s at 1024 x 8192, 2.6 s at 256 x 8192, 3.3 s at 64 x 8192, where each row of
the weight is fetched for too few positions. The products take 1.6 s of that, at the 85 GFLOP/s of large products.
"""

IMPOSSIBLE_LOGIT = -1e30
"""The lowest logit, used instead of -inf for a token that cannot be sampled.

Its probability is 0 as well, but differences, and products with 0, are NaN for -inf and finite for this value.
"""


@dataclass(frozen=True)
class HeadTransform:
    """Scale, cap and temperature that are applied to the last projection's output ``x`` before the softmax.

    ``cap * tanh(scale * x / cap) / temperature``, or ``scale * x / temperature`` without a cap.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of_model(cls, config: Any, *, temperature: float) -> "HeadTransform":
        """Read scale and cap from a transformers config, with the field names of TRL's ``add_fused_lm_head``."""
        text = config.get_text_config()
        # Models without scaling may have the field with the value None. A value of 0.0 is used as it is.
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
            if getattr(text, name, None) is not None:
                scale = float(getattr(text, name))
                break
        else:
            scaling = getattr(text, "logits_scaling", None)
            # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies.
            scale = 1.0 if scaling is None else float(scaling) if text.model_type == "hyperclovax" else 1 / scaling
        return cls(scale=scale, softcap=getattr(text, "final_logit_softcapping", None), temperature=temperature)


def linear_logprobs(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: HeadTransform,
    compute_dtype: torch.dtype | None = None,
    with_entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log p in nats of each target, with gradient, and the entropy in nats of each position's distribution.

    Both are float32, or float64 if ``compute_dtype`` is.

    Args:
        hidden_MH: Hidden states before the last projection, at the positions that predict the targets.
        weight_VH: Weight of the last projection.
        targets_M: One token id per position.
        bias_V: Bias of the last projection, if it has one.
        transform: Scale, cap and temperature of the logits.
        compute_dtype: Dtype that the factors of the products are rounded to; by default the dtype of ``hidden_MH``.
        with_entropy_grad: Whether the entropies carry gradient too.

    Raises:
        ValueError: A target is not a token of the head's vocabulary.
    """
    is_outside_M = (targets_M < 0) | (targets_M >= weight_VH.shape[0])
    logprobs_M, entropies_M = cast(Any, _LinearLogprobs).apply(
        hidden_MH, weight_VH, bias_V, targets_M, transform, compute_dtype or hidden_MH.dtype
    )
    # Checked last, because on a GPU this waits for all queued work.
    if bool(is_outside_M.any()):
        wrong = int(targets_M[is_outside_M][0])
        raise ValueError(f"token id {wrong} is outside the model's vocabulary of {weight_VH.shape[0]} tokens")
    return logprobs_M, entropies_M if with_entropy_grad else entropies_M.detach()


class _LinearLogprobs(torch.autograd.Function):
    """The autograd function of `linear_logprobs`. The order of tiles is fixed, so equal inputs give equal bits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        transform: HeadTransform,
        compute_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # entropies that are only logged cost nothing in the backward pass
        head = _Head(hidden_MH, weight_VH, bias_V, targets_M, transform, compute_dtype)
        num_positions = hidden_MH.shape[0]
        # Over the vocabulary so far: the largest logit, and relative to it the sums of e^z and of z e^z.
        peak_M = head.new(num_positions).fill_(IMPOSSIBLE_LOGIT)
        sum_M, dot_M = head.new(num_positions).zero_(), head.new(num_positions).zero_()
        chosen_M = head.new(num_positions).fill_(math.nan)
        exponentials = head.new_tile()
        for tile in head.tiles():
            rows, z_RU = tile.rows, tile.z_RU
            chosen_M[rows] = torch.where(tile.holds_R, z_RU.gather(1, tile.local_R1)[:, 0], chosen_M[rows])
            peak_R = torch.maximum(peak_M[rows], z_RU.amax(1))
            z_RU.sub_(peak_R[:, None])
            e_RU = torch.exp(z_RU, out=_corner(exponentials, *z_RU.shape))
            fall_R = peak_M[rows] - peak_R
            shrink_R = fall_R.exp()
            dot_M[rows] = shrink_R * (dot_M[rows] + fall_R * sum_M[rows]) + _row_dots(e_RU, z_RU)
            sum_M[rows] = shrink_R * sum_M[rows] + e_RU.sum(1)
            peak_M[rows] = peak_R
        entropies_M = sum_M.log() - dot_M / sum_M
        normaliser_M = peak_M + sum_M.log()
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, normaliser_M, entropies_M)
        ctx.transform, ctx.compute_dtype = transform, compute_dtype
        return chosen_M - normaliser_M, entropies_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_logprobs_M: Tensor | None = grad_outputs[0]
        grad_entropies_M: Tensor | None = grad_outputs[1]
        hidden_MH, weight_VH, bias_V, targets_M, normaliser_M, entropies_M = ctx.saved_tensors
        transform: HeadTransform = ctx.transform
        head = _Head(hidden_MH, weight_VH, bias_V, targets_M, transform, ctx.compute_dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_MH = torch.zeros_like(hidden_MH, dtype=head.sums) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=head.sums) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=head.sums) if needs_bias and bias_V is not None else None
        g_M = torch.zeros_like(normaliser_M) if grad_logprobs_M is None else grad_logprobs_M.to(head.sums)
        spare = head.new_tile() if grad_entropies_M is not None or transform.softcap is not None else None
        for tile in head.tiles():
            rows, z_RU, columns = tile.rows, tile.z_RU, tile.columns
            slope_RU: Tensor | None = None
            if transform.softcap is not None:  # of cap * tanh(x / cap), where z = cap / temperature * tanh
                assert spare is not None
                slope_RU = torch.mul(z_RU, transform.temperature / transform.softcap, out=_corner(spare, *z_RU.shape))
                slope_RU.square_().neg_().add_(1)
                if grad_entropies_M is not None:
                    slope_RU = slope_RU.clone()
            z_RU.sub_(normaliser_M[rows, None])
            # d logprob / dz = [target] - p           d entropy / dz = -p (log p + entropy)
            if grad_entropies_M is None:
                z_RU.exp_().mul_(-g_M[rows, None])
            else:
                assert spare is not None
                p_RU = torch.exp(z_RU, out=_corner(spare, *z_RU.shape))
                h_R1 = grad_entropies_M[rows, None].to(head.sums)
                z_RU.mul_(-h_R1).sub_(g_M[rows, None] + h_R1 * entropies_M[rows, None]).mul_(p_RU)
            z_RU.scatter_add_(1, tile.local_R1, torch.where(tile.holds_R, g_M[rows], 0.0)[:, None])
            if slope_RU is not None:
                z_RU.mul_(slope_RU)
            factor = transform.scale / transform.temperature
            if grad_hidden_MH is not None:
                head.add_product(grad_hidden_MH[rows], z_RU, tile.weight_UH, factor)
            if grad_weight_VH is not None:
                head.add_product(grad_weight_VH[columns], z_RU.t(), tile.hidden_RH, factor)
            if grad_bias_V is not None:
                grad_bias_V[columns].add_(z_RU.sum(0), alpha=factor)
        return (
            None if grad_hidden_MH is None else grad_hidden_MH.to(hidden_MH.dtype),
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


@dataclass(frozen=True, eq=False)
class _Tile:
    """Logits of some positions for some tokens, after scale, cap and temperature. The next tile overwrites ``z_RU``."""

    rows: slice
    columns: slice
    z_RU: Tensor
    hidden_RH: Tensor
    weight_UH: Tensor
    holds_R: Tensor
    """Whether the row's target is in this tile."""
    local_R1: Tensor
    """The target's column in the tile; any column if it is not in this tile."""


class _Head:
    """The last projection: computes its logits tile by tile, in one buffer."""

    def __init__(
        self,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        transform: HeadTransform,
        compute_dtype: torch.dtype,
    ) -> None:
        self.sums = torch.promote_types(compute_dtype, torch.float32)
        self._hidden_MH, self._weight_VH, self._bias_V, self._targets_M = hidden_MH, weight_VH, bias_V, targets_M
        self._transform = transform
        self._rounds_to = compute_dtype
        device = hidden_MH.device.type
        # CUDA multiplies bfloat16 with sums in float32. Elsewhere the rounded factors are multiplied in float32.
        self._factor_dtype = compute_dtype if device == "cuda" else self.sums
        self._mixed = self._factor_dtype != self.sums
        self._rows = min(hidden_MH.shape[0], TILE_ROWS.get(device, TILE_ROWS["cuda"]))
        self._columns = min(weight_VH.shape[0], TILE_VOCABULARY.get(device, TILE_VOCABULARY["cuda"]))

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.sums, device=self._hidden_MH.device)

    def new_tile(self) -> Tensor:
        return self.new(self._rows, self._columns)

    def tiles(self) -> Iterator[_Tile]:
        # The outer loop is over the vocabulary: a slice of the weight and its gradient stays in cache for all rows.
        buffer = self.new_tile()
        for columns in _slices(self._weight_VH.shape[0], self._columns):
            weight_UH = self._as_factor(self._weight_VH[columns])
            for rows in _slices(self._hidden_MH.shape[0], self._rows):
                hidden_RH = self._as_factor(self._hidden_MH[rows])
                z_RU = _corner(buffer, hidden_RH.shape[0], weight_UH.shape[0])
                self._fill(z_RU, hidden_RH, weight_UH, None if self._bias_V is None else self._bias_V[columns])
                local_R = self._targets_M[rows] - columns.start
                holds_R = (local_R >= 0) & (local_R < weight_UH.shape[0])
                local_R1 = torch.where(holds_R, local_R, 0)[:, None]
                yield _Tile(rows, columns, z_RU, hidden_RH, weight_UH, holds_R, local_R1)

    def add_product(self, to: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
        """Add ``factor * left @ right`` to ``to`` in place, with sums in at least float32."""
        if self._mixed:
            left = left.to(self._factor_dtype)
            cast(Any, torch.addmm)(to, left, right, alpha=factor, out_dtype=self.sums, out=to)
        else:
            to.addmm_(left, right, alpha=factor)

    def _fill(self, z_RU: Tensor, hidden_RH: Tensor, weight_UH: Tensor, bias_U: Tensor | None) -> None:
        transform = self._transform
        factor = transform.scale / (transform.softcap or transform.temperature)
        z_RU.zero_()
        self.add_product(z_RU, hidden_RH, weight_UH.t(), factor)
        if bias_U is not None:
            z_RU.add_(bias_U.to(self.sums), alpha=factor)
        z_RU.clamp_(min=IMPOSSIBLE_LOGIT)
        if transform.softcap is not None:
            z_RU.tanh_().mul_(transform.softcap / transform.temperature)

    def _as_factor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._rounds_to).to(self._factor_dtype)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _corner(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """Return the upper left ``rows x columns`` corner of the buffer, as a view."""
    return buffer[:rows, :columns]


def _row_dots(left_RU: Tensor, right_RU: Tensor) -> Tensor:
    """Return the dot product of each row with the same row of the other tensor, without storing all the products."""
    return torch.bmm(left_RU[:, None, :], right_RU[:, :, None])[:, 0, 0]
