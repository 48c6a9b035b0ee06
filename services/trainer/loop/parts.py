"""The objects that the training loop of one run drives. assembly.py builds them."""

from dataclasses import dataclass
from typing import Any

from services.trainer.groups.ledger import Ledger
from services.trainer.loop.admission import Admission
from services.trainer.loop.admission_pace import AdmissionPace
from services.trainer.loop.batch_builder import BatchBuilder
from services.trainer.loop.checkpoint_saver import CheckpointSaver
from services.trainer.loop.evaluation import Evaluations
from services.trainer.loop.in_hand import GroupsInHand
from services.trainer.loop.lost_writes import LostWrites
from services.trainer.loop.push_schedule import PushSchedule
from services.trainer.loop.run_pause import RunPause
from services.trainer.loop.scored_groups import ScoredGroups
from services.trainer.loop.step_report import StepReport
from services.trainer.policy.training_core import TrainingCore
from services.trainer.room import Room
from services.trainer.run_files import RunFiles
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.reports import Reports
from services.trainer.telemetry.run_log import RunLog
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig


@dataclass
class Parts:
    """The objects around the loop."""

    redis: Redis
    keys: RunKeys
    config: RunConfig
    store: RunStore
    core: TrainingCore
    ledger: Ledger
    admission: Admission
    pace: AdmissionPace
    lost_writes: LostWrites
    pause: RunPause
    in_hand: GroupsInHand
    scored: ScoredGroups
    considered_to: str
    """Stream id up to which the checkpoint that was resumed from had considered the scored stream."""
    batches: BatchBuilder
    evaluations: Evaluations
    pushes: PushSchedule
    saver: CheckpointSaver
    report: StepReport
    reports: Reports
    files: RunFiles
    room: Room
    log: RunLog
    traces: GroupTraces
    tokenizer: Any
    replica_id: str
    incarnation: int
    total_steps: int
