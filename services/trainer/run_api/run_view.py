"""The response models of a run: its record, queues, replicas, refusals of replicas, and why it is waiting.

RunRecord -------------------------------------+--> detail() makes a RunDetail
Surroundings, read by run_surroundings.py -----+--> waiting.py explains in a sentence why the run waits
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from services.trainer.telemetry.run_warnings import RunWarning, WarningKind
from shared.beginning import Beginning, Source
from shared.pause import Pause, PausedBy
from shared.redis.run_record import TERMINAL, RunRecord, WaitingKind
from shared.refusals import Kind
from shared.run_options.agents import AGENTIC
from shared.run_options.labels import MetadataValue


class PauseView(BaseModel):
    """The current pause of a run: who or what caused it, when it began, and the failures that led to it."""

    by: PausedBy = Field(description="user: until it is resumed. rewards: also until a group that tests them succeeds")
    since_s: float
    reward_func: str | None = Field(description="The function that failed most; null if no function failed")
    failed_ratio: float = Field(description="Share of its outcomes that were failures when the pause began")
    last_failure: str = Field(description="Message of the last failure")


class BeginningView(BaseModel):
    """The checkpoint, the weights or the adapter that a run began from."""

    source: Source = Field(description="checkpoint, or weights only: a transformers model, or a PEFT adapter")
    said: str = Field(description="The value of resume_from_checkpoint")
    run_id: str | None = Field(description="The run that wrote the checkpoint; null if it is unknown")
    run_name: str | None
    step: int | None = Field(description="Optimizer steps that run had made; null without a checkpoint")
    steps_before: int = Field(description="Steps that max_steps counts, but that were made before this run")
    weights_only: bool = Field(description="Whether optimizer, schedule and data began anew")
    says: str = Field(description="For people, to follow 'began from'; its wording may change")


class RunSummary(BaseModel):
    """A run's id, labels, status and progress. Times are in Unix seconds."""

    run_id: str
    name: str | None
    tags: list[str]
    metadata: dict[str, MetadataValue]
    status: str = Field(description="queued, running, paused, finished, stopped or failed")
    desired: str = Field(description="run, or pause or stop after a request for it")
    reason: str = Field(description="Why it ended or is paused")
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    pause: PauseView | None = Field(description="Null unless it is paused")
    beginning: BeginningView | None = Field(description="Null if it began with the weights of its model")
    run_dir: str = Field(description="Directory of checkpoints, metrics, rollouts and rank.log")
    progress: dict[str, Any] = Field(description="Counts of the surviving lineage, about a second old")


class ListedRun(RunSummary):
    """A run in a list: its summary and, if it is waiting, the reason."""

    waiting_for: str | None = Field(
        description="What the run needs to continue, in words; null when nothing is missing"
    )
    waiting_kind: WaitingKind | None = Field(
        description="The same for programs. restarting, silent_rank, push_failed and disk need a person's attention; "
        "work: groups, or what else the training rank reports"
    )


class GeneratorView(BaseModel):
    """A generator replica that has joined the run: its address, whether it is alive, and its activity."""

    replica_id: str
    url: str
    is_alive: bool
    doing: str = Field(
        default="", description="Its activity while it does not serve the run, such as loading the model"
    )

    @property
    def replica(self) -> str:
        """The replica's name in messages."""
        return replica_name("generator", self.replica_id)

    @property
    def serves(self) -> bool:
        """Whether the replica is alive and serves the run."""
        return self.is_alive and not self.doing


class RefusalView(BaseModel):
    """A replica that cannot serve the run, or that ended while it should serve it."""

    kind: Kind
    replica_id: str
    reason: str
    at_s: float = Field(description="Time of the refusal in Unix seconds")

    @property
    def replica(self) -> str:
        """The replica's name in messages."""
        return replica_name(self.kind, self.replica_id)


class WarningView(BaseModel):
    """A warning about the newest metrics: a kind for programs, and a sentence for people."""

    kind: WarningKind
    says: str = Field(description="For people; its wording may change")


class Queues(BaseModel):
    """Numbers of prompt groups: at generators, at rewarders, scored, settled, and buried as dead letters."""

    prompts: int = Field(default=0, description="With a generator, or waiting for one")
    completions: int = Field(default=0, description="With a rewarder, or waiting for one")
    scored: int = Field(default=0, description="Scored, and waiting to be trained; about a second old")
    settled: int = Field(
        default=0, description="Trained or dropped: they stay in their stream until a checkpoint has them"
    )
    dead_letters: int = Field(default=0, description="Buried, because no consumer could process them")


class RunDetail(ListedRun):
    """One run with its queues, replicas, refusals, warnings and settings."""

    queues: Queues
    generators: list[GeneratorView]
    num_rewarders: int
    num_sessions: int | None = Field(description="Sessions replicas that play the run; null unless it is an agent run")
    refusals: list[RefusalView] = Field(description="Replicas that cannot serve the run, each with its last message")
    warnings: list[WarningView] = Field(description="What looks wrong in the newest metrics, the worst first")
    config: dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """A run's queues, replicas and refusals, from Redis. A queued or ended run in a list needs only ``current_run``."""

    current_run: str | None
    queues: Queues = field(default_factory=Queues)
    generators: list[GeneratorView] = field(default_factory=list[GeneratorView])
    joining: list[str] = field(default_factory=list[str])
    """What live generators do that have not joined the run yet; read only if no generator of the run is alive."""
    num_rewarders: int = 0
    num_sessions: int = 0
    """Live replicas of the sessions service that play the run."""
    refusals: list[RefusalView] = field(default_factory=list[RefusalView])


def is_agentic(record: RunRecord) -> bool:
    """Return whether the run has tools, environments or an agent, so that the sessions service plays its rollouts."""
    return any(record.config.get(name) for name in AGENTIC)


def summary(record: RunRecord) -> RunSummary:
    """Return the summary of a run's record. An ended run shows no activity and no reason for waiting."""
    progress = record.progress
    if record.status in TERMINAL:
        # The reason describes the end. The rank's last activity no longer matters.
        progress = msgspec.structs.replace(progress, starting="", waiting_for="", is_evaluating=False, is_ending=False)
    shown = msgspec.to_builtins(progress)
    del shown["waiting_kind"]  # ListedRun has it, with the causes that only the run API sees
    return RunSummary(
        run_id=record.run_id,
        name=record.name,
        tags=record.tags,
        metadata=record.metadata,
        status=record.status,
        desired=record.desired,
        reason=record.reason,
        created_at_s=record.created_at_s,
        started_at_s=record.started_at_s,
        ended_at_s=record.ended_at_s,
        pause=None if record.pause is None else _pause(record.pause),
        beginning=None if record.beginning is None else _beginning(record.beginning),
        run_dir=record.run_dir,
        progress=shown,
    )


def detail(
    record: RunRecord,
    around: Surroundings,
    *,
    waiting_for: str | None,
    waiting_kind: WaitingKind | None,
    warnings: Sequence[RunWarning],
) -> RunDetail:
    """Return the summary of a run with its config, queues, replicas, refusals and warnings."""
    return RunDetail(
        **summary(record).model_dump(),
        waiting_for=waiting_for,
        waiting_kind=waiting_kind,
        queues=around.queues,
        generators=around.generators,
        num_rewarders=around.num_rewarders,
        num_sessions=around.num_sessions if is_agentic(record) else None,
        refusals=around.refusals,
        warnings=[WarningView(kind=it.kind, says=it.says) for it in warnings],
        config=record.config,
    )


def replica_name(kind: Kind, replica_id: str) -> str:
    """Return a replica's name in messages: ``headrace-generator-0``, but ``generator gpu-node-3``."""
    return replica_id if kind in replica_id else f"{kind} {replica_id}"


def _pause(pause: Pause) -> PauseView:
    return PauseView(
        by=pause.by,
        since_s=pause.since_s,
        reward_func=pause.reward_func or None,
        failed_ratio=pause.failed_ratio,
        last_failure=pause.last_failure,
    )


def _beginning(beginning: Beginning) -> BeginningView:
    return BeginningView(
        source=beginning.source,
        said=beginning.said,
        run_id=beginning.run_id,
        run_name=beginning.run_name,
        step=beginning.step,
        steps_before=beginning.steps_before,
        weights_only=beginning.weights_only,
        says=beginning.in_words(),
    )
