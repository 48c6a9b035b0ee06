"""Attention over rows that are packed end to end, as an attention implementation of transformers.

    query, key, value of | row row row | row row | row | ...  --attention within each row-->  output in the same order
                           equal         equal

Without a fused kernel for packed rows, neighbours of equal length are computed in one call.

A model selects this attention by its name (``PACKED``), and passes the row boundaries as to flash attention:
``cu_seq_lens_q``. transformers builds no mask for an implementation without a mask function, which saves the ``N x N``
mask. Only this function then knows where rows end. A model that does not pass the boundaries is refused, because it
would attend across rows.

Sliding windows, capped scores (Gemma 2) and attention sinks (gpt-oss) are supported. The last two have no fused kernel
in torch and compute a row's ``T x T`` scores. Anything else that changes attention is refused.

    N  tokens in all rows       H  heads       D  size of a head       B  rows of equal length       T  tokens of each
"""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

PACKED = "headrace_packed"
"""Name of the implementation in transformers."""

_MAX_SCORES = 2**20
"""Most scores per head of one call for several rows: 4 MiB of float32 for each head where no fused kernel is used."""

_MAX_FUSED_SIZE = 256
"""Largest head that torch's flash attention computes. Gemma 4's global layers have 512."""
_MEANT = {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_ROWS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_HARMLESS = {"position_ids", "use_cache", "cache_position"} | {
    f"output_{what}" for what in ("attentions", "hidden_states", "router_logits")
}


class NotPackableError(Exception):
    """This model cannot be computed on packed rows; the message says why."""


def register(*, compiles: bool = False) -> None:
    """Register the implementation with transformers. May be called repeatedly.

    Args:
        compiles: Whether torch.compile compiles the layers around it, from now on.
    """
    from transformers import AttentionInterface

    if compiles:
        compiler: Any = torch.compiler
        cast(Any, AttentionInterface).register(PACKED, compiler.disable(packed_attention))
    elif PACKED not in cast(Any, AttentionInterface)():
        cast(Any, AttentionInterface).register(PACKED, packed_attention)


def packed_attention(
    module: Any, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return attention within each row, ``(1, N, H, D)``, with the signature of transformers' attention functions.

    Raises:
        NotPackableError: The model uses a feature that is not supported here.
    """
    boundaries: Tensor | None = kwargs.get("cu_seq_lens_q")
    if boundaries is None:
        raise NotPackableError("it does not pass the boundaries of rows to its attention")
    if attention_mask is not None:
        raise NotPackableError("it passes its own attention mask")
    odd = {name for name, value in kwargs.items() if value is not None and value is not False}
    if odd := odd - _MEANT - _ROWS - _HARMLESS:
        raise NotPackableError(f"its attention uses {', '.join(sorted(odd))}")
    if kwargs.get("dropout"):
        raise NotPackableError("its attention has dropout")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotPackableError("its attention is not causal")
    scale: float | None = kwargs.get("scaling")
    window: int | None = kwargs.get("sliding_window")
    softcap: float | None = kwargs.get("softcap")
    sinks_H: Tensor | None = kwargs.get("s_aux")
    # Boundaries on the GPU select the fused kernel. It has no changed scores, large heads or other sizes of values.
    is_plain = softcap is None and sinks_H is None and query_1HND.shape[-1] <= _MAX_FUSED_SIZE
    if boundaries.is_cuda and is_plain and query_1HND.shape[-1] == value_1HND.shape[-1]:
        output_NHD = _flash(query_1HND, key_1HND, value_1HND, boundaries, kwargs["max_length_q"], scale, window)
        return output_NHD.unsqueeze(0), None
    lengths = [end - begin for begin, end in itertools.pairwise(cast("list[int]", boundaries.tolist()))]
    runs = equal_runs(lengths, max_scores=0 if query_1HND.is_cuda else _MAX_SCORES)
    # split, not slices: the gradient of a slice is a tensor of all N tokens, so that many rows would cost N each.
    parts = [
        torch.split(tensor, [num_rows * length for num_rows, length in runs], dim=2)
        for tensor in (query_1HND, key_1HND, value_1HND)
    ]
    outputs = [
        _attend(
            *(_in_rows(part, num_rows) for part in (query, key, value)),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
        )
        for (num_rows, _), query, key, value in zip(runs, *parts, strict=True)
    ]
    return torch.cat([output_BHTD.transpose(1, 2).flatten(0, 1) for output_BHTD in outputs])[None], None


def equal_runs(lengths: Sequence[int], *, max_scores: int) -> list[tuple[int, int]]:
    """Group neighbouring rows of equal length into attention calls; return number and length of each call's rows.

    Passes are sorted by length (rank_plan.py), so that neighbours are often equal.

    Args:
        lengths: Number of tokens of each row, in order.
        max_scores: Most scores (number of rows times length squared) of a call of several rows. It bounds the memory of
            attention without a fused kernel. 0 makes a call for each row.
    """
    runs: list[tuple[int, int]] = []
    for length, equal in itertools.groupby(lengths):
        num_rows = len(list(equal))
        most = max(1, max_scores // max(1, length**2))
        runs += [(min(most, num_rows - first), length) for first in range(0, num_rows, most)]
    return runs


def can_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's flash attention over packed rows (torch.nn.attention.varlen) can be used here."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _flash(
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    boundaries: Tensor,
    max_length: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query_1HND.dtype
    # Where rotary embeddings or norms are in float32, values have another dtype than queries.
    query_NHD, key_NHD, value_NHD = (
        tensor[0].transpose(0, 1).to(dtype) for tensor in (query_1HND, key_1HND, value_1HND)
    )
    output_NHD: Tensor = cast(Any, varlen_attn)(
        query_NHD,
        key_NHD,
        value_NHD,
        boundaries,
        boundaries,
        max_length,
        max_length,
        scale=scale,
        # transformers counts the token itself as part of the window, the kernel does not.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_NHD.shape[1] != key_NHD.shape[1],
    )
    return output_NHD


def _in_rows(tensor_1HND: Tensor, num_rows: int) -> Tensor:
    """Return ``num_rows`` packed rows of equal length as ``(B, H, T, D)``, a view of the tensor."""
    _, num_heads, num_tokens, size = tensor_1HND.shape
    return tensor_1HND[0].view(num_heads, num_rows, num_tokens // num_rows, size).transpose(0, 1)


def _attend(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return attention within each of B rows of equal length, ``(B, H, T, D)``."""
    length = query_BHTD.shape[2]
    mask_TT = None
    if window is not None and window < length:
        places_T = torch.arange(length, device=query_BHTD.device)
        distance_TT = places_T[:, None] - places_T[None, :]
        mask_TT = (distance_TT >= 0) & (distance_TT < window)
    if softcap is None and sinks_H is None:
        return functional.scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            attn_mask=mask_TT,
            is_causal=mask_TT is None,
            scale=scale,
            enable_gqa=query_BHTD.shape[1] != key_BHTD.shape[1],
        )
    num_sharing = query_BHTD.shape[1] // key_BHTD.shape[1]
    key_BHTD, value_BHTD = (tensor.repeat_interleave(num_sharing, dim=1) for tensor in (key_BHTD, value_BHTD))
    scores_BHTT = query_BHTD @ key_BHTD.transpose(2, 3) * (query_BHTD.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores_BHTT = softcap * torch.tanh(scores_BHTT / softcap)
    if mask_TT is None:
        mask_TT = torch.ones(length, length, dtype=torch.bool, device=scores_BHTT.device).tril()
    scores_BHTT = scores_BHTT.masked_fill(~mask_TT, float("-inf"))
    if sinks_H is not None:  # an extra score per head, without a value
        sinks_BHT1 = sinks_H.to(scores_BHTT.dtype)[None, :, None, None].expand(scores_BHTT.shape[0], -1, length, 1)
        scores_BHTT = torch.cat([scores_BHTT, sinks_BHT1], dim=-1)
    weights_BHTT = scores_BHTT.softmax(-1, dtype=torch.float32)[..., :length]
    return weights_BHTT.to(value_BHTD.dtype) @ value_BHTD
