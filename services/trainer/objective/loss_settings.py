"""LossSettings: the options of the loss as one frozen value, made from a run's config."""

from dataclasses import dataclass
from typing import Self

from shared.run_options.loss import CorrectionMode, LossType
from shared.run_options.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The options of the loss. Names and meanings are as in `shared.run_options.loss`."""

    loss_type: LossType = "dapo"
    is_sequence_level: bool = False
    """``importance_sampling_level == "sequence"``: one ratio per completion."""
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    has_entropy_bonus: bool = False
    corrects: bool = True
    """Whether generator-to-trainer weights correct the loss (``vllm_importance_sampling_correction``)."""
    correction_mode: CorrectionMode = "sequence_mask"
    correction_min: float | None = None
    correction_max: float | None = 3.0
    use_decoupled_loss: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the loss settings of a run's config."""
        correction_min, correction_max = config.correction_bounds()
        return cls(
            loss_type=config.loss_type,
            is_sequence_level=config.importance_sampling_level == "sequence",
            epsilon_low=config.epsilon,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            delta=config.delta,
            sapo_temperature_neg=config.sapo_temperature_neg,
            sapo_temperature_pos=config.sapo_temperature_pos,
            vespo_k_pos=config.vespo_k_pos,
            vespo_lambda_pos=config.vespo_lambda_pos,
            vespo_k_neg=config.vespo_k_neg,
            vespo_lambda_neg=config.vespo_lambda_neg,
            max_completion_length=config.max_completion_length,
            beta=config.beta,
            use_bias_correction_kl=config.use_bias_correction_kl,
            off_policy_mask_threshold=config.off_policy_mask_threshold,
            has_entropy_bonus=config.entropy_coef != 0 or config.use_adaptive_entropy,
            corrects=config.vllm_importance_sampling_correction,
            correction_mode=config.vllm_importance_sampling_mode,
            correction_min=correction_min,
            correction_max=correction_max,
            use_decoupled_loss=config.use_decoupled_loss,
        )
