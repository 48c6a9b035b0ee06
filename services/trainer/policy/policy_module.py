"""The policy as one module: takes packed token ids, returns logprobs and entropies of the sampled tokens.

    | row | row row | ... --backbone, each row for itself--> hidden states --sampled positions--> fused last projection

The last projection runs inside ``forward``, so that FSDP gathers tied embeddings once for both of their uses. This
module decides attention, precision and recomputation. It does not compute the policy loss. Creating a PolicyModule
reads no weights, which may not be loaded yet.

A run in bfloat16 uses autocast: weights, and sums over tokens, are float32; products are of bfloat16 numbers. If the
weights are sharded, FSDP's mixed precision may pass bfloat16 copies, and autocast has nothing left to cast.

    N  tokens in all rows       M  sampled tokens among them       H  hidden size
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.policy.linear_logprobs import HeadTransform, linear_logprobs
from services.trainer.policy.model_options import (
    attention_name,
    backbone,
    checkpoint_layers,
    recomputes,
    run_dtype,
    set_attention,
    turn_dropout_off,
)
from services.trainer.policy.router_loss import router_aux_loss_coef, router_loss
from services.trainer.policy.varlen_attention import PACKED, can_flash
from shared.run_options.run_config import RunConfig

PLAIN = "eager"
"""transformers' own attention in plain steps, which every model has."""


class PolicyModule(nn.Module):
    """Wraps a causal language model: takes packed token ids, returns logprobs and entropies of the sampled tokens.

    Args:
        lm: The transformers model, kept as ``.lm``. Its dropout is turned off. With dropout, trainer and generator
            would disagree on the same weights, and the importance ratio would measure noise.
        config: The run's config.
        device: Device that the module will compute on.
        is_frozen: Whether the module is a reference model, which is never trained.
        is_alone: Whether a single rank trains the module.

    Raises:
        UserError: The model or the device does not support what the config asks for.
    """

    _dtype: torch.dtype
    _head_dtype: torch.dtype
    _boundaries_device: torch.device

    def __init__(
        self, lm: Any, config: RunConfig, *, device: torch.device, is_frozen: bool = False, is_alone: bool = True
    ) -> None:
        super().__init__()
        self.lm = lm
        self.packs = True
        """Whether several rows go into one pass; False after `pack_no_more`."""
        backbone(lm)
        self.router_aux_loss_coef = 0.0 if is_frozen else router_aux_loss_coef(lm, config)
        """Coefficient of the experts' load-balancing loss; 0 without one."""
        self._dtype = run_dtype(config)
        self._head_dtype = torch.float32 if config.cast_lm_head_to_fp32 else self._dtype
        self._transform = HeadTransform.of_model(lm.config, temperature=config.temperature)
        self._attention = attention_name(config, device=device)
        is_fused = config.attn_implementation == "auto" and can_flash(device, self._dtype)
        self._boundaries_device = device if is_fused else torch.device("cpu")
        turn_dropout_off(lm)
        if not is_frozen and recomputes(lm, config, is_alone=is_alone, device=device):
            checkpoint_layers(lm)
        self._own_attention = set_attention(lm, self._attention)
        if is_frozen:
            self.requires_grad_(requires_grad=False)

    def forward(
        self,
        input_ids_N: Tensor,
        position_ids_N: Tensor,
        cu_seqlens: Sequence[int],
        sampled_positions_M: Tensor,
        targets_M: Tensor,
        with_entropy_grad: bool = False,
        with_router_loss: bool = False,
        by_the_model_itself: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logprobs_M in nats, entropies_M and the experts' load-balancing loss over all N tokens, in float32.

        The logprobs have gradient, the entropies only if asked for. The load-balancing loss is None if not asked for.

        Args:
            input_ids_N: Rows, end to end.
            position_ids_N: Counted from 0 in every row.
            cu_seqlens: Start of each row, and the end of the last one.
            sampled_positions_M: Positions whose logits predict a sampled token.
            targets_M: The sampled tokens.
            with_entropy_grad: Whether the loss has an entropy bonus.
            with_router_loss: Whether to compute the load-balancing loss.
            by_the_model_itself: Whether to use the model's own full logits, for a comparison on a single row.
        """
        device = input_ids_N.device
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16)
        if by_the_model_itself:
            with autocast:
                logits_NV: Tensor = self.lm(input_ids=input_ids_N[None], use_cache=False).logits[0]
            logprobs_MV = (logits_NV[sampled_positions_M].float() / self._transform.temperature).log_softmax(-1)
            probabilities_MV = logprobs_MV.exp()
            entropies_M = -torch.xlogy(probabilities_MV, probabilities_MV).sum(-1)
            return logprobs_MV.gather(1, targets_M[:, None])[:, 0], entropies_M, None
        with autocast:
            output: Any = backbone(self.lm)(
                input_ids=input_ids_N[None],
                use_cache=False,
                # Some models that cannot be packed take no positions; a single row starts at 0 without them.
                **(self._row_arguments(position_ids_N, cu_seqlens) if self._tells_rows else {}),
                **({"output_router_logits": True} if with_router_loss else {}),
            )
            balance = router_loss(self.lm, output.get("router_logits")) if with_router_loss else None
        hidden_MH: Tensor = output.last_hidden_state[0, sampled_positions_M]
        head: Any = self.lm.get_output_embeddings()
        logprobs_M, entropies_M = linear_logprobs(
            hidden_MH,
            head.weight,
            targets_M,
            bias_V=getattr(head, "bias", None),
            transform=self._transform,
            compute_dtype=self._head_dtype,
            with_entropy_grad=with_entropy_grad,
        )
        return logprobs_M, entropies_M, balance

    @contextlib.contextmanager
    def exactly(self) -> Generator[None]:
        """Within the block, compute in float32. headrace's own attention (varlen_attention.py) computes row by row."""
        before = self._dtype, self._head_dtype, self._boundaries_device
        self._dtype, self._head_dtype, self._boundaries_device = torch.float32, torch.float32, torch.device("cpu")
        try:
            yield
        finally:
            self._dtype, self._head_dtype, self._boundaries_device = before

    @contextlib.contextmanager
    def plain_attention(self) -> Generator[None]:
        """Within the block, use transformers' slow plain attention, which is correct for one row of any model."""
        chosen, self._attention = self._attention, PLAIN
        set_attention(self.lm, self._attention)
        try:
            yield
        finally:
            self._attention = chosen
            set_attention(self.lm, chosen)

    @contextlib.contextmanager
    def at_temperature(self, temperature: float) -> Generator[None]:
        """Within the block, divide logits by this temperature instead of the run's."""
        before, self._transform = self._transform, dataclasses.replace(self._transform, temperature=temperature)
        try:
            yield
        finally:
            self._transform = before

    @property
    def can_compute_exactly(self) -> bool:
        """Whether the attention in use can compute in float32, as `exactly` does. Flash attention cannot."""
        return not self._attention.startswith("flash_attention")

    def attentions(self) -> list[str]:
        """Return the attention implementations to try, best first. The last one is correct for every model."""
        return [self._attention, self._own_attention, PLAIN]

    def pack_no_more(self, attention: str) -> None:
        """Compute one row per pass from now on, with this attention."""
        self.packs = False
        self._attention = attention
        set_attention(self.lm, attention)

    def attend_row_by_row(self) -> None:
        """Stop using fused attention over packed rows. Packing continues."""
        self._boundaries_device = torch.device("cpu")

    def attend_like(self, other: "PolicyModule") -> None:
        """Use the attention and the packing of another module of the same architecture."""
        self.packs, self._attention = other.packs, other.attentions()[0]
        self._boundaries_device = other._boundaries_device  # noqa: SLF001  of the same class
        set_attention(self.lm, self._attention)

    @property
    def _tells_rows(self) -> bool:
        return self.packs or self._attention == PACKED

    def _row_arguments(self, position_ids_N: Tensor, cu_seqlens: Sequence[int]) -> dict[str, Any]:
        """Return the arguments that tell the model and its attention where rows begin.

        transformers builds the masks of its flex and plain attention from position ids that restart at 0.
        """
        arguments: dict[str, Any] = {"position_ids": position_ids_N[None]}
        if self._attention == PACKED or self._attention.startswith("flash_attention"):
            where = self._boundaries_device if self._attention == PACKED else position_ids_N.device
            boundaries = torch.tensor(cu_seqlens, dtype=torch.int32, device=where)
            longest = max(end - begin for begin, end in itertools.pairwise(cu_seqlens))
            arguments |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            arguments |= {"max_length_q": longest, "max_length_k": longest}
        return arguments
