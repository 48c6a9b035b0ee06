"""Settings of simulated replicas for times, lengths and logprobs. Every number has a unit and a default.

The defaults are round numbers for a model with a few billion weights on one data-centre GPU. They are assumptions:
replace them with measurements on the hardware that you plan for.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.settings import from_environment


class SimulationSettings(BaseSettings):
    """Distributions of one simulated fleet; read from ``HEADRACE_SIMULATED_*``."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_SIMULATED_", extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0, description="Seed of all draws; replica i draws from (seed, i)")
    speed_up: float = Field(default=1.0, gt=0, description="Simulated seconds per second of real time")

    first_token_s: float = Field(default=0.05, ge=0, description="Median time to the first token without prefill, s")
    first_token_sigma: float = Field(default=0.25, ge=0, description="Sigma of the logarithm of first_token_s")
    prefill_tokens_per_s: float = Field(
        default=50_000.0, gt=0, description="Prompt tokens per second; the time is added to first_token_s"
    )
    step_s: float = Field(default=0.012, gt=0, description="Time per token of a single sequence, s")
    step_s_per_sequence: float = Field(
        default=0.0001, ge=0, description="Added to step_s for each further sequence that decodes at the same time, s"
    )
    max_num_seqs: int = Field(default=256, ge=1, description="Sequences that decode at the same time; others wait")

    completion_tokens: float = Field(default=200.0, ge=1, description="Median length of a completion, tokens")
    completion_tokens_sigma: float = Field(
        default=0.7, ge=0, description="Sigma of the logarithm of completion_tokens; 0 makes all equal"
    )
    surprise_nats: float = Field(default=0.5, gt=0, description="Mean of a token's negative logprob, nats")

    tool_call_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the turns with tools that call the first tool, from 0 to 1"
    )
    turn_journal: Path | None = Field(
        default=None, description="File to which each sampled turn of a conversation is appended as a JSON line"
    )

    transport: Literal["simulated", "gloo"] = Field(
        default="simulated", description="simulated: pushes move no bytes; gloo: bytes are received and discarded"
    )
    receive_bytes_per_s: float = Field(
        default=10e9, gt=0, description="Simulated speed of a push that moves no bytes, bytes per second"
    )

    def decode_step_s(self, num_sequences: int) -> float:
        """Return how long one decode step of ``num_sequences`` takes, in simulated seconds."""
        return self.step_s + self.step_s_per_sequence * max(0, num_sequences - 1)


def read_simulation_settings() -> SimulationSettings:
    """Read the settings of the simulation from ``HEADRACE_SIMULATED_`` environment variables.

    Raises:
        UserError: A variable is wrong; the message names it.
    """
    return from_environment(SimulationSettings)
