"""The demo's hyperparameters, under TRL's names where TRL has the option.

They were chosen with a single-process simulation of the run in which the sampling policy was 2 or 4 steps stale.
A small batch is enough because the warmed-up policy gets some completions right in most groups. Importance ratios are
truncated per token: a run this short needs the completions that a mask over whole sequences would leave out.
"""

from headrace.demo.task import MAX_ANSWER_TOKENS

RUN_OPTIONS: dict[str, float | int | str] = {
    "max_steps": 200,
    "groups_per_step": 16,
    "num_generations": 8,
    "max_completion_length": MAX_ANSWER_TOKENS + 2,
    "temperature": 1.0,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 10,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "scale_rewards": "group",
    "max_staleness": 2,
}
"""The run's options. The command adds the paths, the reward function's name and the seed."""
