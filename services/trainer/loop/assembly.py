"""Builds everything that the training loop of one run drives.

A checkpoint's ledger is compared with the streams before training starts, so that every group is accounted for:

    record --> data sets, tokenizer, model --> newest valid checkpoint --> groups accounted for --> Parts
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from services.trainer.checkpoints.checkpoint import CheckpointWriter, load_into, newest_valid, remove_leftovers
from services.trainer.data.dataset import open_dataset, open_eval_dataset
from services.trainer.data.prompt_encoder import PromptEncoder, load_tokenizer
from services.trainer.fence import check_not_fenced
from services.trainer.groups.ledger import Ledger
from services.trainer.groups.schedule import total_steps
from services.trainer.loop.admission import Admission
from services.trainer.loop.admission_pace import AdmissionPace
from services.trainer.loop.batch_builder import BatchBuilder
from services.trainer.loop.checkpoint_saver import CheckpointSaver
from services.trainer.loop.evaluation import Evaluations, refuse_without_usable_prompts
from services.trainer.loop.in_hand import GroupsInHand
from services.trainer.loop.lost_writes import LostWrites
from services.trainer.loop.parts import Parts
from services.trainer.loop.probe_prompt import make_prober
from services.trainer.loop.push_schedule import PushSchedule
from services.trainer.loop.reconcile import missing_groups, withdraw_unsampled
from services.trainer.loop.run_pause import RunPause
from services.trainer.loop.scored_groups import BEGINNING, ScoredGroups
from services.trainer.loop.step_report import StepReport
from services.trainer.loop.trainable import require_trainable
from services.trainer.policy.training_core import TrainingCore
from services.trainer.ranks.lead import Lead
from services.trainer.ranks.rank_group import make_core
from services.trainer.room import Room
from services.trainer.run_files import RunFiles
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.reports import Reports
from services.trainer.telemetry.run_log import RunLog
from shared.file_roots import FileRoots
from shared.messages import ScoredGroup
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunRecord, RunStore
from shared.redis.streams import StreamConsumer

log = logging.getLogger(__name__)


async def assemble(
    redis: Redis,
    store: RunStore,
    record: RunRecord,
    sender: Any,
    *,
    incarnation: int,
    replica_id: str = "trainer",
    lead: Lead | None = None,
    room: Room | None = None,
    data_roots: FileRoots | None = None,
) -> Parts:
    """Load everything, resume from the newest valid checkpoint, and account for every group ever admitted."""
    config, keys = record.parsed_config(), RunKeys(record.run_id)
    files = RunFiles(Path(record.run_dir))
    room = room or Room()
    room.tell = lambda says: store.write_starting(record, f"waiting for {says}")
    await store.write_starting(record, "reading the data set")
    rows = await asyncio.to_thread(open_dataset, config, data_roots)
    eval_rows = await asyncio.to_thread(open_eval_dataset, config, data_roots)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.model_revision)
    steps = total_steps(config, num_rows=len(rows))
    await store.write_starting(record, "loading the model")
    core = await asyncio.to_thread(lambda: make_core(config, total_steps=steps, lead=lead))
    # Before the removal of leftovers: files that a newer incarnation is writing are not leftovers.
    await check_not_fenced(redis, keys, incarnation)
    ledger, num_tokens, considered_to = await _resume(core, files, store, record, incarnation=incarnation)
    logs = files.run_dir / "rollouts"
    await room.write(lambda: logs.mkdir(parents=True, exist_ok=True), what="its logs", where=files.run_dir)
    run_log = RunLog(redis, keys=keys, run_dir=files.run_dir, room=room)
    await room.write(lambda: run_log.cut_back_to(core.policy_version), what="its logs", where=files.run_dir)
    room.tell = None
    encoder = PromptEncoder(tokenizer, chat_template_kwargs=config.chat_template_kwargs)
    if eval_rows is not None:
        await asyncio.to_thread(refuse_without_usable_prompts, eval_rows, config=config, encoder=encoder)
    admission = Admission(
        redis,
        keys=keys,
        config=config,
        rows=rows,
        encoder=encoder,
        ledger=ledger,
        incarnation=incarnation,
        replica_id=replica_id,
    )
    evaluations = Evaluations(
        redis,
        keys=keys,
        config=config,
        rows=eval_rows,
        encoder=encoder,
        incarnation=incarnation,
        replica_id=replica_id,
        last_step=run_log.last_evaluated_step(),
    )
    in_hand = GroupsInHand(files.run_dir)

    def check(group: ScoredGroup) -> None:
        require_trainable(group, vocab_size=core.vocab_size, total_steps=steps)
        in_hand.refuse_condemned(group)

    scored = ScoredGroups(
        redis, keys=keys, ledger=ledger, incarnation=incarnation, consumer=_seat(redis, keys, incarnation), check=check
    )
    lost_writes = LostWrites(
        redis, keys=keys, ledger=ledger, scored=scored, admission=admission, evaluations=evaluations
    )
    await lost_writes.make_up()  # identifies the server: losses from here on are noticed
    await withdraw_unsampled(redis, keys, ledger, incarnation=incarnation)
    admission.admit_again(await missing_groups(redis, keys, ledger))
    traces = GroupTraces.from_environment(os.environ, run_id=keys.run_id, replica_id=replica_id)
    batches = BatchBuilder(config, scored=scored, ledger=ledger, traces=traces)
    reports = Reports(config, run_id=keys.run_id, run_dir=files.run_dir, resumed_step=core.policy_version)
    pushes = PushSchedule(
        sender,
        run_log=run_log,
        prober=make_prober(config, core, encoder, rows),
        num_pushes=record.progress.pushes,
        num_confirmed=record.progress.pushes_confirmed,
        num_probes_failed=record.progress.probes_failed,
    )
    return Parts(
        redis=redis,
        keys=keys,
        config=config,
        store=store,
        core=core,
        ledger=ledger,
        admission=admission,
        pace=AdmissionPace(config, ledger=ledger),
        lost_writes=lost_writes,
        pause=RunPause(store, run_log=run_log, record=record, failures=batches.failures),
        in_hand=in_hand,
        scored=scored,
        considered_to=considered_to,
        batches=batches,
        evaluations=evaluations,
        pushes=pushes,
        saver=CheckpointSaver(
            CheckpointWriter(files.checkpoints, keep=config.save_total_limit, incarnation=incarnation),
            redis=redis,
            keys=keys,
            incarnation=incarnation,
            core=core,
            tokenizer=tokenizer,
            scored=scored,
            run_log=run_log,
            replica_id=replica_id,
            room=room,
            traces=traces,
        ),
        report=StepReport(
            redis,
            keys=keys,
            config=config,
            ledger=ledger,
            scored=scored,
            pushes=pushes,
            log=run_log,
            reports=reports,
            replica_id=replica_id,
            seen_tokens=num_tokens,
        ),
        reports=reports,
        files=files,
        room=room,
        log=run_log,
        traces=traces,
        tokenizer=tokenizer,
        replica_id=replica_id,
        incarnation=incarnation,
        total_steps=steps,
    )


async def _resume(
    core: TrainingCore, files: RunFiles, store: RunStore, record: RunRecord, *, incarnation: int
) -> tuple[Ledger, int, str]:
    """Load the newest valid checkpoint into the core, if there is a checkpoint.

    Returns:
        The loop's state in the checkpoint: the ledger, the number of tokens trained on, and the position up to which
            the scored stream was considered. Without a checkpoint, the initial state.
    """
    await asyncio.to_thread(lambda: remove_leftovers(files.checkpoints, incarnation=incarnation))
    checkpoint = await asyncio.to_thread(newest_valid, files.checkpoints)
    if checkpoint is None:
        return Ledger(), 0, BEGINNING
    await store.write_starting(record, f"loading the checkpoint of step {checkpoint.step}")
    await asyncio.to_thread(load_into, core, checkpoint)
    log.info("resumed from %s at step %d", checkpoint.path, checkpoint.step)
    kept = checkpoint.extra
    return Ledger.from_json(kept["ledger"]), int(kept["num_tokens"]), str(kept["considered_to"])


def _seat(redis: Redis, keys: RunKeys, incarnation: int) -> StreamConsumer:
    return StreamConsumer(
        redis,
        stream=keys.scored,
        consumer_group=TRAINERS,
        name=consumer_name(incarnation),
        leases=keys.leases(TRAINERS),
        dead=keys.dead,
        reclaim_every_s=1.0,
        max_deliveries=None,  # entries wait here for a checkpoint, across any number of restarts
    )


def consumer_name(incarnation: int) -> str:
    """Return this incarnation's own name on the scored stream, so that a stale trainer never reads as a newer one."""
    return f"trainer-{incarnation}"
