"""What is asked of a fleet of simulated replicas."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.run_config import RunConfig


@dataclass(frozen=True)
class Load:
    """What is asked of a fleet.

    Attributes:
        num_replicas: In one process.
        groups_per_replica: In ``groups_per_step``; with ``max_staleness`` it bounds what is in flight.
        seconds: Measured, after the warm-up.
        warmup_steps: Steps of the stand-in before.
        scorer: ``pass-through`` or ``rewarder``.
        simulation: HEADRACE_SIMULATED_* without the prefix.
    """

    num_replicas: int
    groups_per_replica: int
    num_generations: int
    max_staleness: int
    num_prompt_tokens: int
    max_completion_length: int
    seconds: float
    warmup_steps: int
    scorer: str
    simulation: Mapping[str, str]

    def config(self, directory: Path) -> RunConfig:
        """Return the run's config."""
        reward = "benchmarks.bench_simulated.rewards:branch" if self.scorer == "rewarder" else "pass_through:one"
        return RunConfig(
            model=str(directory / "model"),
            dataset_name=str(directory / "none.jsonl"),
            reward_funcs=[reward],
            num_generations=self.num_generations,
            groups_per_step=self.groups_per_replica * self.num_replicas,
            max_staleness=self.max_staleness,
            max_completion_length=self.max_completion_length,
        )
