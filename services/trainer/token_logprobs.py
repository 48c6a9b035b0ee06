"""Log-probabilities of given tokens under the policy, and the entropy of the policy there.

Logits are divided by the sampling temperature, so that what is compared with the generator's logprobs is the same
distribution. The other sampling settings (top_p, top_k, min_p, repetition_penalty) are left out, as in TRL: where they
are on, the generator's logprobs are those of the cut-off distribution and the importance ratio says so.

    N  positions       V  vocabulary
"""

import torch
from torch import Tensor

CHUNK_POSITIONS = 1024
"""The full distribution (V floats a position) is held for this many positions at a time, when entropy is computed."""


def token_logprobs(logits_NV: Tensor, token_ids_N: Tensor, *, temperature: float) -> Tensor:
    """Return log p of each token in nats, in float32 at least, with gradient.

    Nothing of size N x V is made but the logits at temperature: log softmax is the logit less the log-sum-exp.
    """
    logits_NV = _at_temperature(logits_NV, temperature)
    chosen_N = logits_NV.gather(-1, token_ids_N.unsqueeze(-1)).squeeze(-1)
    return chosen_N - torch.logsumexp(logits_NV, dim=-1)


@torch.no_grad()
def token_entropies(logits_NV: Tensor, *, temperature: float) -> Tensor:
    """Return the entropy of each position's distribution in nats, in float32 at least, without gradient."""
    entropies: list[Tensor] = []
    for start in range(0, logits_NV.shape[0], CHUNK_POSITIONS):
        chunk = logits_NV[start : start + CHUNK_POSITIONS]
        logprobs = torch.log_softmax(_at_temperature(chunk, temperature), dim=-1)
        # A logit of -inf is a token that cannot be sampled: 0 * -inf counts as 0, as in the limit.
        entropies.append(-(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1))
    return torch.cat(entropies) if entropies else logits_NV.new_zeros(0)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # log-sum-exp in 8 bits of mantissa is off by more than the ratio to be measured
    return logits if temperature == 1.0 else logits / temperature
