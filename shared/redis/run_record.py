"""The record of one run in Redis: its config, its requested state, its status and its progress.

    POST /v1/runs --> queued --> running <-> paused     (desired: pause, or its rewards fail; pause.py)
                         |          |------> finished
                         |          |------> stopped    (desired: stop)
                         +----------+------> failed     (with the reason) --resumed by a user--> queued

run_store.py reads and writes these records.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from shared.beginning import Beginning
from shared.errors import UserError
from shared.pause import Desired, Pause
from shared.run_options.labels import MetadataValue
from shared.run_options.run_config import RunConfig, parse_run_config

Status = Literal["queued", "running", "paused", "finished", "stopped", "failed"]
WaitingKind = Literal[
    "queue", "user", "rank", "restarting", "silent_rank", "generator", "sessions", "rewarder", "push_failed", "disk",
    "work",
]  # fmt: skip
TERMINAL: frozenset[str] = frozenset({"finished", "stopped", "failed"})


class Waiting(msgspec.Struct, frozen=True):
    """The reason why a run waits, for programs and for people."""

    kind: WaitingKind
    """The kind of wait, for programs."""
    says: str
    """A sentence for people, to follow "waiting for"; empty if the run waits for nothing. Its wording may change."""


class BestEvaluation(msgspec.Struct, frozen=True):
    """The evaluation that was best so far. The best checkpoint has the same step."""

    step: int
    metric: str
    """Name of the metric by which the run compares its evaluations."""
    value: float
    num_without_improvement: int = 0
    """Evaluations since the last improvement; early stopping counts them."""


class Progress(msgspec.Struct, frozen=True):
    """The state of a run's training, which its training rank writes about once a second.

    Counts leave out training that a crash has undone: ``admitted = trained + dropped + in flight`` always holds.
    """

    step: int = 0
    max_steps: int = 0
    policy_version: int = 0
    waiting_for: str = "the training rank to start"
    waiting_kind: WaitingKind = "work"
    """The kind of ``waiting_for``."""
    groups_admitted: int = 0
    groups_trained: int = 0
    groups_dropped: dict[str, int] = {}
    groups_scored: int = 0
    """Scored groups that wait to be trained."""
    starting: str = ""
    """The training rank's work before it trains, to follow "which is"; empty once it trains."""
    num_generators: int = 0
    pushes: int = 0
    pushes_confirmed: int = 0
    probes_failed: int = 0
    """Generators that the probe after a push has taken out."""
    num_left_out: int = 0
    """Replicas that did not get the last policy version pushed."""
    left_out: dict[str, str] = {}
    """Up to 8 of the replicas that ``num_left_out`` counts, by id, each with the reason."""
    paused_s: float = 0.0
    """Seconds for which the run was paused so far, over all of its trainers."""
    is_evaluating: bool = False
    """Whether no step is made because of an evaluation, before the next step or after the last one."""
    is_ending: bool = False
    """Whether no step is left to make: the run still pushes, writes a checkpoint, evaluates and leaves its model."""
    disk_full: str = ""
    """The thing that has no room on the run's disk, to follow "waiting for"; empty if everything has room."""
    best: BestEvaluation | None = None
    """The best evaluation so far; None if the run does not look for its best checkpoint, or has made none."""
    model_step: int | None = None
    """The step whose weights the final model has; None before the run's end."""
    epoch: float = 0.0
    """Passes over the data set so far, such as 1.5, computed from the steps made and the ``steps_before``."""
    num_tokens: int = 0
    """Tokens trained on so far: every completion with its prompt."""
    updated_at_s: float = 0.0


class RunRecord(msgspec.Struct, frozen=True):
    """The decoded Redis record of one run, from which the run API answers."""

    run_id: str
    config: dict[str, Any]
    status: Status
    desired: Desired
    reason: str
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    run_dir: str
    progress: Progress
    pause: Pause | None = None
    """Why it is paused; None unless its status is ``paused``."""
    beginning: Beginning | None = None
    """The checkpoint, weights or adapter that it began from; None if it began with the weights of its model."""

    @property
    def name(self) -> str | None:
        """The run's name, which other runs may have too; None without one."""
        return self.config.get("name")

    @property
    def steps_before(self) -> int:
        """Optimizer steps that count towards ``max_steps``, but that the run it continues has made."""
        return 0 if self.beginning is None else self.beginning.steps_before

    @property
    def steps_made(self) -> int:
        """Optimizer steps that count towards ``max_steps``: the run's own, plus the ``steps_before``."""
        return self.steps_before + self.progress.step

    @property
    def is_ending(self) -> bool:
        """Whether a live run makes no more optimizer steps.

        A rank that has just started has not said so yet. Then a run with ``max_steps`` is ending if it has made them.
        """
        has_made_all = 0 <= self.config.get("max_steps", -1) <= self.steps_made
        return self.status in ("running", "paused") and (has_made_all or self.progress.is_ending)

    @property
    def tags(self) -> list[str]:
        """Words by which runs are filtered in lists; empty without any."""
        found: list[str] = self.config.get("tags", [])  # an older release did not write them
        return found

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        """The user's texts and numbers about the run, by name; empty without any."""
        found: dict[str, MetadataValue] = self.config.get("metadata", {})
        return found

    def parsed_config(self) -> RunConfig:
        """Return the config as it was validated at submit.

        Raises:
            UserError: Another release of headrace wrote it, with other settings.
        """
        try:
            return parse_run_config(self.config)
        except UserError as error:
            raise UserError(
                f"run {self.run_id} was submitted to another release of headrace than this one: {error}",
                field=error.field,
            ) from error


def decode_record(run_id: str, fields: Mapping[bytes, bytes]) -> RunRecord | None:
    """Return the record in the fields of a run's hash, or None if they hold no run."""
    if not fields or b"config" not in fields:
        return None
    text = {name.decode(): value for name, value in fields.items()}
    status: Any = text["status"].decode()
    desired: Any = text["desired"].decode()

    def seconds(name: str) -> float | None:
        return float(text[name]) if text.get(name) else None

    return RunRecord(
        run_id=run_id,
        config=msgspec.json.decode(text["config"]),
        status=status,
        desired=desired,
        reason=text["reason"].decode(),
        created_at_s=float(text["created_at_s"]),
        started_at_s=seconds("started_at_s"),
        ended_at_s=seconds("ended_at_s"),
        run_dir=text["run_dir"].decode(),
        progress=msgspec.json.decode(text["progress"], type=Progress),
        pause=msgspec.json.decode(text["pause"], type=Pause) if status == "paused" else None,
        beginning=msgspec.json.decode(text["beginning"], type=Beginning) if "beginning" in text else None,
    )
