"""One forward pass over packed rows: from training rows to tensors in the loss's layout.

    | row | row row | --PolicyModule--> logprobs_M --> logprobs_BT, row b's sampled tokens at [b, :n_b]

Entries without a token are zero and ignored.

    B  rows in the pass       T  sampled tokens of a row       M  sampled tokens of the pass
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.policy.core_results import PerTokenArrays, TokenArray
from services.trainer.policy.microbatches import Microbatch, TrainRow, pack_rows
from services.trainer.policy.policy_module import PolicyModule


@dataclass(frozen=True, eq=False)
class RowPass:
    """Logprobs and entropies from one forward pass, one line per row (B, T). Entries without a token are zero."""

    microbatch: Microbatch
    logprobs_BT: Tensor
    entropies_BT: Tensor
    mask_BT: Tensor
    router_loss: Tensor | None = None
    """Load-balancing loss of the experts over the pass's tokens, if requested."""

    def by_row(self, *tensors_BT: Tensor) -> list[tuple[TokenArray, ...]]:
        """Return a tuple for each row: every tensor's entries at the row's sampled tokens, as numpy arrays."""
        seen = torch.stack([tensor_BT.detach().float() for tensor_BT in tensors_BT]).cpu().numpy()
        return [tuple(array_BT[b][mask_T] for array_BT in seen) for b, mask_T in enumerate(self.microbatch.mask_BT)]


def compute(
    module: PolicyModule,
    microbatch: Microbatch,
    *,
    device: torch.device,
    with_entropy_grad: bool = False,
    with_router_loss: bool = False,
    by_the_model_itself: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the module on packed rows, and return logprobs_M, entropies_M and the router loss (None if not asked for).

    The flags are as in `PolicyModule.forward`.
    """
    logprobs_M, entropies_M, router_loss = module(
        torch.as_tensor(microbatch.input_ids_N, device=device),
        torch.as_tensor(microbatch.position_ids_N, device=device),
        microbatch.cu_seqlens,
        torch.as_tensor(microbatch.sampled_positions_M, device=device),
        torch.as_tensor(microbatch.targets_M, device=device),
        with_entropy_grad=with_entropy_grad,
        with_router_loss=with_router_loss,
        by_the_model_itself=by_the_model_itself,
    )
    return logprobs_M, entropies_M, router_loss


def row_pass(
    module: PolicyModule,
    rows: Sequence[TrainRow],
    row_indices: tuple[int, ...],
    *,
    device: torch.device,
    with_entropy_grad: bool = False,
    with_router_loss: bool = False,
) -> RowPass:
    """Make one forward pass over ``rows[i] for i in row_indices``, or over a dummy row if no index is given."""
    microbatch = pack_rows(rows, row_indices)
    logprobs_M, entropies_M, router_loss = compute(
        module, microbatch, device=device, with_entropy_grad=with_entropy_grad, with_router_loss=with_router_loss
    )
    mask_BT = torch.as_tensor(microbatch.mask_BT, device=device)
    zeros_BT = torch.zeros(mask_BT.shape, dtype=logprobs_M.dtype, device=device)
    return RowPass(
        microbatch=microbatch,
        logprobs_BT=zeros_BT.masked_scatter(mask_BT, logprobs_M),
        entropies_BT=zeros_BT.masked_scatter(mask_BT, entropies_M),
        mask_BT=mask_BT,
        router_loss=router_loss,
    )


def in_rows(arrays: Sequence[npt.NDArray[Any] | None], *, device: torch.device) -> Tensor | None:
    """Return a (B, T) tensor with one array per row, padded with zeros, or None if no row has an array.

    Raises:
        ValueError: Only some of the rows have an array.
    """
    given = [array for array in arrays if array is not None]
    if not given:
        return None
    if len(given) < len(arrays):
        raise ValueError("only some rows of the pass have old or reference logprobs")
    array_BT = np.zeros((len(given), max(array.size for array in given)), dtype=given[0].dtype)
    for b, array in enumerate(given):
        array_BT[b, : array.size] = array
    return torch.as_tensor(array_BT, device=device)


def advantages_in_rows(rows: Sequence[TrainRow], *, device: torch.device) -> Tensor:
    """Return the rows' advantages (B, T), or (B, 1) if each row has one for all its tokens."""
    arrays = [row.advantages for row in rows]
    if any(array.size > 1 for array in arrays):
        arrays = [np.broadcast_to(row.advantages, row.num_sampled) for row in rows]
    advantages_BT = in_rows(arrays, device=device)
    assert advantages_BT is not None
    return advantages_BT


def rows_at_fault(rows: Sequence[TrainRow], done: RowPass) -> list[int]:
    """Return the indices of the pass's rows with NaN or infinite values; of all its rows if none has such a value."""
    indices = done.microbatch.row_indices
    seen = done.by_row(done.logprobs_BT, done.entropies_BT)
    faulty = [
        index
        for index, (logprobs, entropies) in zip(indices, seen, strict=True)
        if not np.isfinite([rows[index].advantages.sum(), logprobs.sum(), entropies.sum()]).all()
        or np.isinf(rows[index].generator_logprobs).any()
    ]
    return faulty or list(indices)


def per_token_arrays(rows: Sequence[TrainRow], done: RowPass, wanted: Collection[int]) -> dict[int, PerTokenArrays]:
    """Return logprobs, importance ratios, entropies and advantage of the pass's rows in ``wanted``, by row index."""
    seen = done.by_row(done.logprobs_BT, done.entropies_BT)
    with np.errstate(over="ignore"):  # infinite, and logged as null
        return {
            index: PerTokenArrays(
                trainer_logprobs=logprobs,
                importance_ratio=np.exp(logprobs - rows[index].generator_logprobs),
                entropy=entropies,
                advantage=rows[index].advantage,
            )
            for index, (logprobs, entropies) in zip(done.microbatch.row_indices, seen, strict=True)
            if index in wanted
        }
