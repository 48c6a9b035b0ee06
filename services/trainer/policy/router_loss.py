"""The load-balancing loss of mixture-of-experts models: measures how unevenly tokens are spread over the experts.

    router logits of every layer --transformers' load_balancing_loss_func--> one number per pass

``num_experts * sum over experts of (share of tokens sent to the expert) * (mean probability of the expert)``, over the
tokens of all layers together: Switch Transformer, arXiv 2101.03961, equations 4 to 6. Whether the loss is used, and
with which coefficient, is decided as in TRL's GRPOTrainer.
"""

import importlib
from typing import Any

from torch import Tensor

from services.trainer.objective.loss import PolicyLoss, StepTotals
from services.trainer.objective.token_stats import TokenStats, Values
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

_FIELD = "router_aux_loss_coef"
_OF_ANOTHER_KIND = frozenset({"doge"})
"""Model types that have their own load-balancing loss."""


def router_aux_loss_coef(lm: Any, config: RunConfig) -> float:
    """Return the coefficient of the load-balancing loss: the run's, else the model's; 0 means no such loss.

    Raises:
        UserError: The run sets a coefficient, but the model has no experts to balance.
    """
    of_model: Any = lm.config.get_text_config()
    if hasattr(of_model, "output_router_logits") and _num_experts(of_model):
        chosen = getattr(of_model, _FIELD, 0.0) if config.router_aux_loss_coef is None else config.router_aux_loss_coef
        return float(chosen or 0.0)
    if config.router_aux_loss_coef:
        raise UserError(
            f"router_aux_loss_coef={config.router_aux_loss_coef} balances the experts of a mixture-of-experts model, "
            f"but {type(lm).__name__} does not return its router's logits; leave it out",
            field=_FIELD,
        )
    return 0.0


def router_loss(lm: Any, router_logits: tuple[Tensor, ...] | None) -> Tensor:
    """Return the load-balancing loss of one forward pass over all its tokens, in float32 with gradient.

    Args:
        lm: The model.
        router_logits: Router logits of the pass, one (tokens x experts) tensor per layer; None if the model has none.

    Raises:
        UserError: The model did not return its router logits, or its config lacks the number of experts.
    """
    of_model: Any = lm.config.get_text_config()
    num_experts, top_k = _num_experts(of_model), getattr(of_model, "num_experts_per_tok", None)
    if not router_logits or not num_experts or top_k is None:
        raise UserError(
            f"{type(lm).__name__} does not return its router's logits with their number of experts, so there is no "
            "load-balancing loss; set router_aux_loss_coef: 0",
            field=_FIELD,
        )
    # The mixture-of-experts models of transformers share Mixtral's function.
    mixtral: Any = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    loss: Tensor = mixtral.load_balancing_loss_func(router_logits, num_experts, top_k)
    return loss


def add_router_loss(
    result: PolicyLoss, loss_of_pass: Tensor, *, coef: float, num_tokens: int, totals: StepTotals
) -> PolicyLoss:
    """Return the loss of one pass with its share of the step's load-balancing loss added.

    The step's load-balancing loss is the mean over its passes, weighted by their tokens.

    Args:
        result: Loss of the pass's rows.
        loss_of_pass: Load-balancing loss of the pass.
        coef: Coefficient of the load-balancing loss.
        num_tokens: Tokens of the pass, including prompts.
        totals: Totals of the whole step.

    Raises:
        ValueError: ``totals.num_pass_tokens`` is None.
    """
    if totals.num_pass_tokens is None:
        raise ValueError("the load-balancing loss of a step needs totals.num_pass_tokens")
    term = coef * loss_of_pass * (num_tokens / max(totals.num_pass_tokens, 1))
    values: Values = {"loss": term, "num_router_tokens": num_tokens, "router_loss_sum": loss_of_pass * num_tokens}
    return PolicyLoss(loss=result.loss + term, stats=result.stats + TokenStats.of_tensors(values))


def _num_experts(of_model: Any) -> int:
    """Return the number of experts to balance; 0 for a dense model, or for a type with a balancing loss of its own."""
    if of_model.model_type in _OF_ANOTHER_KIND:
        return 0
    names = ("num_experts", "num_local_experts")
    return next((int(found) for name in names if (found := getattr(of_model, name, None))), 0)
