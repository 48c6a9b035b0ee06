"""Our trainer core against TRL's GRPOTrainer: the loss, the gradient of every weight, and the metrics.

The policy has changed since the batch began. The sampling policy and the reference are different policies. So no ratio
is 1, and every clip and weight has an effect. Both sides start from tokens, generator logprobs and rewards. Ours packs
rows and fuses the head; TRL pads. The grid is loss type x level x correction x beta x what is left out. Reward scaling
alternates.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.objective.entropy_control import EntropyControl
from services.trainer.objective.loss import StepTotals
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from shared.arrays import Logprobs
from shared.run_options.run_config import RunConfig
from tests.conformance import oracle
from tests.conformance.batches import (
    REWARD_NAMES,
    Completion,
    PromptGroup,
    options,
    random_groups,
    row_key,
    sampled_by_another_policy,
    train_rows,
)
from tests.conformance.conftest import Models
from tests.trainer.cores import make_core

TOLERANCE = 1e-5
OFFSET = 1.0
"""Added to every advantage on both sides. Without it, the terms of a loss cancel, some to a ten-thousandth of their
size. In float32, the remainder differs by more than the tolerance between any two orders of summation.
"""

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
REFUSED = {("vespo", "sequence"), ("luspo", "token")}
"""Pairs of loss type and level that RunConfig refuses. TRL only warns about them."""

CORRECTIONS: dict[str, dict[str, Any]] = {
    "off": {"vllm_importance_sampling_correction": False},
    **{
        mode: {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": lowest,
            "vllm_importance_sampling_clip_max": highest,
        }
        for mode, lowest, highest in (
            ("token_truncate", None, 1.3),
            ("token_mask", 0.6, 1.6),
            ("sequence_truncate", 0.5, 2.0),
            ("sequence_mask", None, 2.0),
        )
    },
}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "truncated": {"mask_truncated_completions": True},
    "low_entropy": {"top_entropy_quantile": 0.4},
    "off_policy": {"off_policy_mask_threshold": 0.02},
    "beyond_delta": {"delta": 1.5},
    "entropy_bonus": {"entropy_coef": 0.05},
    "all_at_once": {
        "mask_truncated_completions": True,
        "top_entropy_quantile": 0.6,
        "off_policy_mask_threshold": 0.02,
        "entropy_coef": 0.05,
    },
}
BETAS: tuple[dict[str, Any], ...] = ({"beta": 0.0}, {"beta": 0.1})
LOSS_METRICS = ("kl", "entropy", "policy_loss", "cispo_clip_ratio", "clip_ratio/", "vespo/", "sampling/")
SCALINGS = ("group", "batch", "none")


class Worst:
    """The largest relative differences, and where they occurred."""

    def __init__(self) -> None:
        self.num_cases = 0
        self._differences = {"loss": 0.0, "gradient": 0.0, "metric": 0.0}
        self._cases: dict[str, Any] = {}

    def see(self, what: str, difference: float, case: object) -> None:
        if difference >= self._differences[what]:
            self._differences[what], self._cases[what] = difference, case

    def assert_small(self) -> None:
        for what, difference in self._differences.items():
            assert difference <= TOLERANCE, f"{what} differs by {difference:.1e}: {self._cases[what]}"

    def __str__(self) -> str:
        told = ", ".join(f"{what} {difference:.1e}" for what, difference in self._differences.items())
        return f"{self.num_cases} cases, largest relative difference: {told}"


def base_options(loss_type: str, level: str) -> dict[str, Any]:
    """Return a loss type's options, chosen so that clipping and gating occur often."""
    # With a second iteration, TRL also computes logprobs at the beginning of the batch if nothing is corrected.
    base = options(importance_sampling_level=level, loss_type=loss_type, num_iterations=2)
    match loss_type:
        case "cispo":
            return base | {"epsilon_high": 1.05}
        case "sapo":
            return base | {"sapo_temperature_neg": 2.0, "sapo_temperature_pos": 1.5}
        case "vespo":
            return base | {"vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}
        case _ if level == "sequence":  # the ratios of whole completions are closer to 1
            return base | {"epsilon": 0.004, "epsilon_high": 0.006}
        case _:
            return base | {"epsilon": 0.1, "epsilon_high": 0.15}


def legal_corrections(loss_type: str) -> list[dict[str, Any]]:
    return [
        correction
        for name, correction in CORRECTIONS.items()
        if not (loss_type == "vespo" and name.startswith("sequence"))
    ]


def legal_left_out(loss_type: str, level: str, *, beta: float) -> list[dict[str, Any]]:
    """Return the options for leaving out tokens or rows, one after the other. With a KL term, only three of them."""
    narrow = {"delta": 1.01} if level == "sequence" else {}
    return [
        left_out | {name: value for name, value in narrow.items() if name in left_out}
        for name, left_out in LEFT_OUT.items()
        if not ("delta" in left_out and loss_type not in CLIPPED)
        and not (beta and name not in ("nothing", "beyond_delta", "all_at_once"))
    ]


def must_happen(loss_type: str) -> set[str]:
    """Return the metrics that must not be 0 in the whole grid. Otherwise it would compare less than it seems to."""
    everywhere = {"kl", "policy_loss", "sampling/truncated_share"}
    if loss_type in CLIPPED:
        return everywhere | {"clip_ratio/low_mean", "clip_ratio/high_mean"}
    return everywhere | {"cispo": {"cispo_clip_ratio"}, "vespo": {"vespo/phi_seq_mean"}}.get(loss_type, set[str]())


class Ours:
    """One trainer core at the changed weights, which is given one set of options after the other."""

    def __init__(self, models: Models, groups: list[PromptGroup]) -> None:
        plain = options(gradient_checkpointing=False, max_tokens_per_microbatch=90)  # two passes, or three
        self._core: PolicyCore = make_core(models.moved, **plain)
        everything = train_rows(groups, make_core_config(models, {}))
        of_start = make_core(models.start, **plain).score(everything)
        of_reference = make_core(models.reference, **plain).score(everything)
        self._scored = {
            row_key(row): replace(row, old_logprobs=old.trainer_logprobs, reference_logprobs=reference.trainer_logprobs)
            for row, old, reference in zip(everything, of_start, of_reference, strict=True)
        }

    def loss_and_gradients(
        self, rows: list[TrainRow], config: RunConfig, *, num_rollouts: int
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the metrics of one step, including the loss, and the gradient of each weight."""
        core = self._core
        control = EntropyControl(config)
        # Creating a core takes longer than a step. For the loss, it keeps only these three attributes from its config.
        vars(core).update(_entropy=control)
        vars(vars(core)["_passes"]).update(_config=config, _settings=LossSettings.of(config))
        core.discard()
        scored = [self._scored[row_key(row)] for row in rows]
        complete = [
            replace(
                row,
                advantage=row.advantage + OFFSET,
                old_logprobs=known.old_logprobs,
                reference_logprobs=known.reference_logprobs if config.beta != 0 else None,
            )
            for row, known in zip(rows, scored, strict=True)
        ]
        num_tokens = sum(row.num_sampled for row in rows)
        totals = StepTotals(num_rollouts=num_rollouts, num_tokens=float(num_tokens), num_step_tokens=num_tokens)
        stats = core.accumulate(complete, totals=totals).token_stats
        gradients = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in core.lm.named_parameters()
        }
        return stats.metrics() | control.metrics(), gradients


def make_core_config(models: Models, chosen: dict[str, Any]) -> RunConfig:
    """Return our config with these options."""
    plain: dict[str, Any] = {"model": str(models.moved), "dataset_name": "train.jsonl", "max_tokens_per_microbatch": 90}
    return RunConfig.model_validate(
        plain | {"reward_funcs": list(REWARD_NAMES), "reward_weights": [1.0, 0.5]} | options(**chosen)
    )


@pytest.fixture(scope="module")
def groups(models: Models) -> list[PromptGroup]:
    """Return a batch that was sampled by a slightly different policy than the one at the beginning of the batch."""
    drawn = random_groups(3, 4, seed=37)
    scores = make_core(models.start, **options()).score(train_rows(drawn, make_core_config(models, {})))
    return sampled_by_another_policy(drawn, [each.trainer_logprobs for each in scores], spread=0.2, seed=8)


@pytest.fixture(scope="module")
def ours(models: Models, groups: list[PromptGroup]) -> Ours:
    return Ours(models, groups)


def relative(mine: float, theirs: float, *, at_least: float = 0.0) -> float:
    """Return the difference relative to TRL's number, or to ``at_least`` if that is larger."""
    return abs(mine - theirs) / max(abs(theirs), at_least)


def gradient_difference(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference divided by the norm, over all weights."""
    assert mine.keys() == theirs.keys()
    difference = sum(float((mine[name] - theirs[name]).double().square().sum()) for name in theirs)
    norm = sum(float(theirs[name].double().square().sum()) for name in theirs)
    return math.sqrt(difference / norm)


def counts_rows_left_out(name: str, config: RunConfig) -> bool:
    """Whether TRL's metric is a mean over completions that includes masked ones, as unclipped and with weight 1.

    Our metrics do not include them (docs/algorithms.md).
    """
    if not config.mask_truncated_completions:
        return False
    if name.startswith("sampling/importance_sampling_ratio"):
        return config.vllm_importance_sampling_mode.startswith("sequence")
    if name.startswith("vespo/"):
        return True
    return "clip_ratio" in name and config.importance_sampling_level == "sequence"


@pytest.mark.timeout(300)  # 30 to 60 comparisons each, a few seconds on an idle machine
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [pair for pair in itertools.product(LOSS_TYPES, ("token", "sequence")) if pair not in REFUSED],
)
def test_loss_gradients_and_metrics_are_trls(
    loss_type: str,
    level: str,
    models: Models,
    groups: list[PromptGroup],
    ours: Ours,
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    worst, happened = Worst(), set[str]()
    start, moved, reference = (oracle.weights(path) for path in (models.start, models.moved, models.reference))
    scalings = itertools.cycle(SCALINGS)
    for beta in BETAS:
        base = base_options(loss_type, level) | beta
        theirs = oracle.make_oracle(
            models.start, groups, tmp_path, reward_weights=[1.0, 0.5], **base, **CORRECTIONS["off"]
        )
        if theirs.ref_model is not None:
            theirs.ref_model.load_state_dict(reference)
        for correction in legal_corrections(loss_type):
            chosen = correction | {"scale_rewards": next(scalings)}
            losses: list[float] = []
            for left_out in legal_left_out(loss_type, level, **beta):
                oracle.choose(theirs, **chosen, **left_out)
                theirs.model.load_state_dict(start)
                inputs = oracle.score(theirs, groups)
                inputs["advantages"] = inputs["advantages"] + OFFSET
                theirs.model.load_state_dict(moved)
                loss, gradients = oracle.loss_and_gradients(theirs, inputs)

                case = base | chosen | left_out
                config = make_core_config(models, case)
                rows = train_rows(groups, config)
                mine, my_gradients = ours.loss_and_gradients(rows, config, num_rollouts=12)
                losses.append(loss)
                happened |= {name for name, value in mine.items() if value != 0}
                worst.num_cases += 1
                worst.see("loss", relative(mine["loss"], loss), case)
                worst.see("gradient", gradient_difference(my_gradients, gradients), case)
                for name, value in oracle.metrics(theirs).items():
                    if name.startswith(LOSS_METRICS) and not counts_rows_left_out(name, config):
                        worst.see("metric", relative(mine[name], value, at_least=0.1), (name, case))
            assert len(set(losses)) == len(losses), f"something that was left out made no difference: {base | chosen}"
    assert happened >= must_happen(loss_type)
    tell(f"{loss_type} {level}: {worst}")
    worst.assert_small()


@pytest.mark.timeout(300)
def test_with_an_advantage_for_each_token_loss_and_gradients_are_trls(
    models: Models, groups: list[PromptGroup], ours: Ours, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Subclasses of TRL's trainer may pass advantages of shape (B, T), as if an answer's parts were judged apart."""
    worst = Worst()
    start, moved, reference = (oracle.weights(path) for path in (models.start, models.moved, models.reference))
    completions = [completion for group in groups for completion in group.completions]
    for loss_type, level in itertools.product(LOSS_TYPES, ("token", "sequence")):
        if (loss_type, level) in REFUSED:
            continue
        case: dict[str, Any] = base_options(loss_type, level) | CORRECTIONS["token_truncate"] | {"beta": 0.1}
        theirs = oracle.make_oracle(models.start, groups, tmp_path, reward_weights=[1.0, 0.5], **case)
        theirs.ref_model.load_state_dict(reference)
        for left_out in (LEFT_OUT["nothing"], LEFT_OUT["off_policy"]):
            oracle.choose(theirs, **left_out)
            theirs.model.load_state_dict(start)
            inputs = oracle.score(theirs, groups)
            num_tokens = inputs["completion_ids"].shape[1]
            drift_T = torch.linspace(-1.5, 1.5, num_tokens)
            inputs["advantages"] = inputs["advantages"][:, None] + OFFSET + drift_T
            theirs.model.load_state_dict(moved)
            loss, gradients = oracle.loss_and_gradients(theirs, inputs)

            config = make_core_config(models, case | left_out)
            rows = [
                replace(row, advantage=row.advantages + _at_sampled(drift_T, completion))
                for row, completion in zip(train_rows(groups, config), completions, strict=True)
            ]
            mine, my_gradients = ours.loss_and_gradients(rows, config, num_rollouts=12)
            worst.num_cases += 1
            worst.see("loss", relative(mine["loss"], loss), case | left_out)
            worst.see("gradient", gradient_difference(my_gradients, gradients), case | left_out)
    tell(f"advantages of tokens: {worst}")
    worst.assert_small()


def _at_sampled(drift_T: torch.Tensor, completion: Completion) -> Logprobs:
    """Return the numbers at the sampled tokens of the completion."""
    is_sampled = np.array(completion.is_sampled) == 1
    found: Logprobs = drift_T.numpy()[: len(completion.is_sampled)][is_sampled]
    return found
