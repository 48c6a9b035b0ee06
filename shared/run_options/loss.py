"""Run options for the loss: TRL's GRPO losses, importance sampling corrections, KL and entropy terms.

Names, defaults and meanings come from ``GRPOConfig`` in TRL 1.16; docs/algorithms.md has the equations. An option
that would have no effect is refused, where TRL would ignore it silently.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Positive, Section, Share

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

_CLIPPED: tuple[LossType, ...] = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
_SUMS_TOKENS: tuple[LossType, ...] = ("dr_grpo", "dapo", "bnpo", "cispo")


def what_departs_from_gspo(loss_type: str, importance_sampling_level: str) -> list[str]:
    """Return TRL 1.16's warning if sequence-level ratios meet a loss that sums over tokens, else an empty list."""
    if importance_sampling_level != "sequence" or loss_type not in _SUMS_TOKENS:
        return []
    return [
        f"importance_sampling_level sequence with loss_type {loss_type} weights each sequence by its completion "
        "length, which GSPO does not; loss_type grpo is GSPO's"
    ]


class LossOptions(Section):
    """Options of the loss, the advantages, and the importance sampling correction."""

    loss_type: LossType = Field(default="dapo", description="Which loss; docs/algorithms.md has the equations")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Whether ratios are of tokens or of whole completions (GSPO)"
    )
    epsilon: float = Field(default=0.2, gt=0, lt=1, description="Clip range below 1")
    epsilon_high: float | None = Field(
        default=None,
        gt=0,
        description="Clip range above 1, epsilon if left out; for cispo the bound of the ratio itself",
    )
    delta: float | None = Field(default=None, gt=0, description="Upper bound of the ratio in two-sided clipping")
    sapo_temperature_neg: Positive = Field(
        default=1.05, description="Temperature of sapo where the advantage is not positive"
    )
    sapo_temperature_pos: Positive = Field(
        default=1.0, description="Temperature of sapo where the advantage is positive"
    )
    vespo_k_pos: float = Field(default=2.0, ge=0, description="Power of vespo's weight, advantage not negative")
    vespo_lambda_pos: float = Field(default=3.0, ge=0, description="Decay of vespo's weight, advantage not negative")
    vespo_k_neg: float = Field(default=3.0, ge=0, description="Power of vespo's weight, advantage negative")
    vespo_lambda_neg: float = Field(default=2.0, ge=0, description="Decay of vespo's weight, advantage negative")

    # Advantages
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Divisor of centred rewards: the std of their group, the std of the batch, or none",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize", description="normalize_then_sum normalises each reward function separately (GDPO)"
    )

    # Tokens and completions left out of the loss
    mask_truncated_completions: bool = Field(
        default=False, description="Leave completions that hit max_completion_length out of the loss"
    )
    top_entropy_quantile: Share = Field(
        default=1.0, description="Share of the tokens, by highest entropy, that stay in the policy loss"
    )
    off_policy_mask_threshold: Positive | None = Field(
        default=None, description="Leave completions with a negative advantage out above this mean KL, in nats"
    )

    # Reference model and entropy
    beta: float = Field(default=0.0, ge=0, description="Weight of the KL term; 0 loads no reference model")
    use_bias_correction_kl: bool = Field(
        default=True, description="Multiply the KL term by the loss's ratio, π / π_old"
    )
    sync_ref_model: bool = Field(default=False, description="Move the reference model towards the policy (TR-DPO)")
    ref_model_mixup_alpha: Share = Field(default=0.6, description="Share of the policy in each such move")
    ref_model_sync_steps: int = Field(default=512, ge=1, description="Optimizer steps between such moves")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus")
    use_adaptive_entropy: bool = Field(default=False, description="Adapt entropy_coef towards entropy_target")
    entropy_coef_min: float = Field(default=0.0, ge=0)
    entropy_coef_max: float = Field(default=1.0, ge=0)
    entropy_coef_delta: float = Field(default=0.005, ge=0, description="Change of entropy_coef in a step")
    entropy_target: float = Field(default=0.2, ge=0, description="Target entropy in nats per token")

    # Mixture-of-experts models
    router_aux_loss_coef: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the loss that balances the experts; the model's own weight if left out; 0 turns it off",
    )

    # Several steps on one batch
    num_iterations: int = Field(default=1, ge=1, description="Passes over the groups of one batch")
    steps_per_generation: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps a batch is split into; a batch has this many times groups_per_step groups",
    )

    # Generator to trainer
    vllm_importance_sampling_correction: bool = Field(
        default=True, description="Correct for differences between the generator's and the trainer's logprobs"
    )
    vllm_importance_sampling_mode: CorrectionMode = Field(
        default="sequence_mask",
        description="Whether weights outside the bounds are cut or zeroed, per token or per completion",
    )
    vllm_importance_sampling_clip_max: Positive | None = Field(default=3.0, description="Upper bound of the weights")
    vllm_importance_sampling_clip_min: Positive | None = Field(default=None, description="Lower bound of the weights")
    vllm_importance_sampling_cap: Positive | None = Field(
        default=None, description="TRL's older name of vllm_importance_sampling_clip_max; give only one"
    )
    use_decoupled_loss: bool = Field(
        default=True,
        description="Clip around the trainer's own policy at the beginning of the batch (arXiv 2505.24298); "
        "False clips around the policy that sampled",
    )

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _trl_also_takes_booleans(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return "group" if value else "none"
        return value

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        for name, reason in self.unread().items():
            raise ValueError(f"{name}={getattr(self, name)} would change nothing: {reason}")
        return self

    def unread(self) -> dict[str, str]:
        """Return the options of the loss that are set but have no effect, each with the reason."""
        return {
            name: reason
            for reason, names in self._unread()
            for name in names
            if getattr(self, name) != LossOptions.model_fields[name].default
        }

    def _unread(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield a reason, and the options that would have no effect for this reason."""
        if self.loss_type not in _CLIPPED:
            reason = f"loss_type {self.loss_type} does not clip; {', '.join(_CLIPPED)} do"
            yield reason, ("epsilon", "delta")
            if self.loss_type != "cispo":
                yield reason, ("epsilon_high",)
        if self.loss_type != "sapo":
            yield "it is an option of loss_type sapo", ("sapo_temperature_neg", "sapo_temperature_pos")
        if self.loss_type != "vespo":
            reason = "it is an option of loss_type vespo"
            yield reason, ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        if self.multi_objective_aggregation == "normalize_then_sum":
            yield "normalize_then_sum scales by the std of the group and then of the batch", ("scale_rewards",)
        if self.beta == 0:
            yield "the loss has no KL term with beta 0; set beta", ("use_bias_correction_kl", "sync_ref_model")
        if not self.sync_ref_model:
            yield "set sync_ref_model: true as well", ("ref_model_mixup_alpha", "ref_model_sync_steps")
        if not self.use_adaptive_entropy:
            reason = "set use_adaptive_entropy: true as well"
            yield reason, ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
        if not self.vllm_importance_sampling_correction:
            names = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min", "cap"))
            yield "vllm_importance_sampling_correction is false", names

    @model_validator(mode="after")
    def _the_clip_range_makes_sense(self) -> Self:
        if self.loss_type == "cispo":
            if self.epsilon_high is None or self.epsilon_high < 1:
                raise ValueError(
                    f"loss_type cispo cuts the ratio at epsilon_high itself, not at 1 + epsilon_high: epsilon_high="
                    f"{self.epsilon_high} would cut even the policy's own tokens, whose ratio is 1; ScaleRL uses 5"
                )
            return self
        high = self.clip_range()[1]
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise ValueError(
                f"epsilon_high={self.epsilon_high} is below epsilon={self.epsilon}; the upper clip range is meant to "
                "be wider (DAPO uses 0.2 and 0.28)"
            )
        if self.delta is not None and self.delta <= high:
            raise ValueError(
                f"delta={self.delta} is not above 1 + epsilon_high = {high:g}, so the clip there would never act; "
                "delta bounds ratios that the clip lets pass (INTELLECT-2 uses 4)"
            )
        return self

    @model_validator(mode="after")
    def _the_level_suits_the_loss(self) -> Self:
        if self.loss_type == "luspo" and self.importance_sampling_level != "sequence":
            raise ValueError(
                "loss_type luspo is GSPO's loss times the length of the completion; "
                "set importance_sampling_level: sequence (for token-level ratios with sums use loss_type dr_grpo)"
            )
        if self.loss_type == "vespo" and self.importance_sampling_level == "sequence":
            raise ValueError(
                "loss_type vespo makes its own weight of a completion and reads no importance_sampling_level; "
                "leave it at token"
            )
        return self

    @model_validator(mode="after")
    def _the_entropy_coefficient_can_adapt(self) -> Self:
        if self.use_adaptive_entropy:
            if self.entropy_coef_min >= self.entropy_coef_max:
                raise ValueError(
                    f"entropy_coef_min={self.entropy_coef_min} is not below entropy_coef_max={self.entropy_coef_max}, "
                    "so entropy_coef could not adapt"
                )
            if not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
                raise ValueError(
                    f"use_adaptive_entropy begins with entropy_coef={self.entropy_coef}, which is outside "
                    f"entropy_coef_min={self.entropy_coef_min} and entropy_coef_max={self.entropy_coef_max}"
                )
        return self

    @model_validator(mode="after")
    def _the_correction_has_bounds_that_make_sense(self) -> Self:
        if not self.vllm_importance_sampling_correction:
            return self
        if not self.use_decoupled_loss:
            raise ValueError(
                "with use_decoupled_loss: false the loss itself compares the policy with the sampling policy, so "
                "vllm_importance_sampling_correction would correct for the same difference twice; set it to false"
            )
        default_max = type(self).model_fields["vllm_importance_sampling_clip_max"].default
        if self.vllm_importance_sampling_cap is not None and self.vllm_importance_sampling_clip_max != default_max:
            raise ValueError(
                "vllm_importance_sampling_cap is TRL's older name of vllm_importance_sampling_clip_max; give one"
            )
        lower, upper = self.correction_bounds()
        mode = self.vllm_importance_sampling_mode
        if lower is not None and upper is not None and lower >= upper:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={lower} is not below vllm_importance_sampling_clip_max={upper}"
            )
        if (lower is not None and lower > 1) or (upper is not None and upper < 1):
            raise ValueError(
                f"vllm_importance_sampling_clip_min={lower} and vllm_importance_sampling_clip_max={upper} leave out 1, "
                "the weight of every token on which generator and trainer agree"
            )
        if mode.endswith("truncate") and lower is None and upper is None:
            raise ValueError(
                f"vllm_importance_sampling_mode {mode} needs vllm_importance_sampling_clip_max or "
                "vllm_importance_sampling_clip_min, or there is nothing to truncate to"
            )
        if self.loss_type == "vespo" and mode.startswith("sequence"):
            raise ValueError(
                f"loss_type vespo multiplies the weights of a completion's tokens itself, so "
                f"vllm_importance_sampling_mode {mode} cannot be used; use token_truncate or token_mask"
            )
        return self

    def clip_range(self) -> tuple[float, float]:
        """Return the bounds of the clipped ratio: 1 - epsilon, and 1 + epsilon_high (1 + epsilon if that is None)."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def correction_bounds(self) -> tuple[float | None, float | None]:
        """Return the lower and the upper bound of the generator-to-trainer weights; None means no bound."""
        upper = self.vllm_importance_sampling_cap or self.vllm_importance_sampling_clip_max
        return self.vllm_importance_sampling_clip_min, upper

    def steps_per_batch(self) -> int:
        """Return the number of optimizer steps on one batch of groups."""
        return self.num_iterations * self.steps_per_generation
