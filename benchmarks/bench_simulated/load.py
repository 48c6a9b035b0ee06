"""The load of a fleet of simulated replicas."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.run_options.run_config import RunConfig


@dataclass(frozen=True)
class Load:
    """The load of a fleet.

    Attributes:
        num_replicas: Number of replicas in one process.
        groups_per_replica: Groups per replica in ``groups_per_step``. Together with ``max_staleness`` it bounds the
            groups in flight.
        seconds: Measured time after the warm-up, in seconds.
        warmup_steps: Steps of the stand-in before the measurement.
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
            admission="eager",  # the steps take no time, so the window is always full
            max_completion_length=self.max_completion_length,
        )
