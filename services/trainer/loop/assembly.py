"""Builds the training loop of one run, with all objects that it uses.

A checkpoint's ledger is compared with the streams before training starts, so that every group is accounted for:

    record --resumed.py--> data, model, the newest checkpoint's state --> groups accounted for --> training loop
"""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from services.trainer.checkpoints.best_checkpoint import BestCheckpoint, BestRule
from services.trainer.checkpoints.checkpoint_writer import CheckpointWriter
from services.trainer.data.dataset import PromptDataset
from services.trainer.fence import check_not_fenced
from services.trainer.groups.ledger import DEAD_LETTER
from services.trainer.intake.admission import Admission
from services.trainer.intake.admission_pace import AdmissionPace
from services.trainer.intake.batch_builder import BatchBuilder
from services.trainer.intake.evaluation import Evaluations, refuse_without_usable_prompts
from services.trainer.intake.external_changes import ExternalChanges
from services.trainer.intake.intake import Intake
from services.trainer.intake.lost_writes import LostWrites
from services.trainer.intake.reconcile import missing_groups, withdraw_unsampled
from services.trainer.intake.run_pause import RunPause
from services.trainer.intake.scored_groups import ScoredGroups, require_trainable
from services.trainer.loop.batch_trainer import BatchTrainer
from services.trainer.loop.checkpoint_saver import CheckpointSaver
from services.trainer.loop.in_hand import GroupsInHand
from services.trainer.loop.outflow import Outflow
from services.trainer.loop.push_schedule import PushSchedule, Sender, make_prober
from services.trainer.loop.reporting import Reporting
from services.trainer.loop.resumed import Inputs, LoopState, load_inputs, open_log, resume, row_cursor
from services.trainer.loop.training_loop import TrainingLoop
from services.trainer.push.prober import Prober
from services.trainer.ranks.lead import Lead
from services.trainer.run_context import RunContext
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.reports import Reports
from services.trainer.telemetry.run_log import RunLog
from shared.files.file_roots import FileRoots
from shared.messages import ScoredGroup
from shared.redis.keys import TRAINERS
from shared.redis.streams import StreamConsumer

log = logging.getLogger(__name__)

_MAX_UNUSABLE_OF_A_STREAM = 100_000
"""Unusable rows in a row after which a stream, whose length is not known, counts as unusable."""


async def assemble(
    run: RunContext,
    sender: Sender,
    *,
    terminate: asyncio.Event,
    lead: Lead | None = None,
    data_roots: FileRoots | None = None,
) -> TrainingLoop:
    """Load the run's data and model, resume from its newest valid checkpoint, and return its training loop.

    Every group ever admitted is accounted for: settled, on a stream, a dead letter, or admitted again.
    """
    config, files = run.config, run.files
    run.room.tell = lambda says: run.starting(f"waiting for {says}")
    inputs = await load_inputs(run, lead=lead, data_roots=data_roots)
    # Before the removal of leftovers: files that a newer incarnation is writing are not leftovers.
    await check_not_fenced(run.redis, run.keys, run.incarnation)
    state = await resume(run, inputs.core, data_roots=data_roots)
    run_log = await open_log(run, inputs.core, is_resumed=state.step is not None)
    run.room.tell = None
    if inputs.eval_rows is not None:
        await asyncio.to_thread(refuse_without_usable_prompts, inputs.eval_rows, config=config, encoder=inputs.encoder)
    traces = GroupTraces.from_environment(os.environ, run_id=run.keys.run_id, replica_id=run.replica_id)
    torch_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
    in_hand = GroupsInHand(files.run_dir)
    rule = BestRule.of(config)
    best = None if rule is None else BestCheckpoint(rule, run_log.evaluations())
    intake = await _make_intake(run, inputs, state, sender, in_hand=in_hand, run_log=run_log, traces=traces)
    prober = await asyncio.to_thread(  # the rows of a stream may come from a network
        lambda: make_prober(config, inputs.core, inputs.encoder, inputs.rows, torch_thread=torch_thread)
    )
    outflow = _make_outflow(
        run,
        inputs,
        sender,
        prober=prober,
        scored=intake.scored,
        torch_thread=torch_thread,
        terminate=terminate,
        run_log=run_log,
        traces=traces,
        resumed_step=state.step,
    )
    outflow.saver.keep_best(None if best is None else best.step)
    return TrainingLoop(
        inputs.core,
        config,
        trainer=BatchTrainer(
            inputs.core,
            config,
            length=inputs.length,
            run_id=run.keys.run_id,
            run_dir=files.run_dir,
            in_hand=in_hand,
            torch_thread=torch_thread,
            wait_for_push=outflow.wait_for_push,
        ),
        intake=intake,
        outflow=outflow,
        reporting=Reporting(
            run,
            core=inputs.core,
            intake=intake,
            outflow=outflow,
            log=run_log,
            trackers=Reports(
                config,
                run_id=run.keys.run_id,
                run_dir=files.run_dir,
                total_steps=inputs.length.total_steps,
                resumed_step=inputs.core.policy_version,
            ),
            traces=traces,
            seen_tokens=state.num_tokens,
            length=inputs.length,
            num_rows=inputs.num_rows(config),
            best=best,
        ),
        terminate=terminate,
        length=inputs.length,
        rows=row_cursor(run),
        best=best,
    )


async def _make_intake(
    run: RunContext,
    inputs: Inputs,
    state: LoopState,
    sender: Sender,
    *,
    in_hand: GroupsInHand,
    run_log: RunLog,
    traces: GroupTraces,
) -> Intake:
    """Return the intake. It will admit again the groups that are neither settled nor on a stream."""
    redis, keys, config, ledger = run.redis, run.keys, run.config, state.ledger
    reported = ledger.dropped_as(DEAD_LETTER)

    def check(group: ScoredGroup) -> None:
        require_trainable(group, vocab_size=inputs.core.vocab_size, total_steps=inputs.length.total_steps)
        in_hand.refuse_condemned(group)

    admission = Admission(
        redis,
        keys=keys,
        config=config,
        rows=inputs.rows_left(row_cursor(run)),
        num_rows=len(inputs.rows) if isinstance(inputs.rows, PromptDataset) else _MAX_UNUSABLE_OF_A_STREAM,
        encoder=inputs.encoder,
        ledger=ledger,
        incarnation=run.incarnation,
        replica_id=run.replica_id,
    )
    evaluations = Evaluations(
        redis,
        keys=keys,
        config=config.in_steps(inputs.length.total_steps),
        rows=inputs.eval_rows,
        encoder=inputs.encoder,
        incarnation=run.incarnation,
        replica_id=run.replica_id,
        length=inputs.length,
        last_step=run_log.last_evaluated_step(),
    )
    scored = ScoredGroups(
        redis, keys=keys, ledger=ledger, incarnation=run.incarnation, consumer=_seat(run), check=check
    )
    batches = BatchBuilder(config, scored=scored, ledger=ledger, traces=traces)
    pause = RunPause(run.store, run_log=run_log, record=run.record, failures=batches.failures)
    lost_writes = LostWrites(
        redis,
        keys=keys,
        ledger=ledger,
        scored=scored,
        admission=admission,
        evaluations=evaluations,
        write_again=(sender.require_pushed, pause.write_again),
    )
    await lost_writes.make_up()  # identifies the server: losses from here on are noticed
    await withdraw_unsampled(redis, keys, ledger, incarnation=run.incarnation)
    admission.admit_again(await missing_groups(redis, keys, ledger))
    return Intake(
        ledger=ledger,
        admission=admission,
        pace=AdmissionPace(config, ledger=ledger),
        scored=scored,
        considered_to=state.considered_to,
        batches=batches,
        evaluations=evaluations,
        pause=pause,
        changes=ExternalChanges(
            run,
            ledger=ledger,
            scored=scored,
            evaluations=evaluations,
            failures=batches.failures,
            log=run_log,
            reported=reported,
        ),
        lost_writes=lost_writes,
    )


def _make_outflow(
    run: RunContext,
    inputs: Inputs,
    sender: Sender,
    *,
    prober: Prober | None,
    scored: ScoredGroups,
    torch_thread: ThreadPoolExecutor,
    terminate: asyncio.Event,
    run_log: RunLog,
    traces: GroupTraces,
    resumed_step: int | None,
) -> Outflow:
    config, progress, files = run.config, run.record.progress, run.files
    pushes = PushSchedule(
        sender,
        run_log=run_log,
        prober=prober,
        num_pushes=progress.pushes,
        num_confirmed=progress.pushes_confirmed,
        num_probes_failed=progress.probes_failed,
    )
    saver = CheckpointSaver(
        CheckpointWriter(files.checkpoints, keep=config.save_total_limit, incarnation=run.incarnation),
        redis=run.redis,
        keys=run.keys,
        incarnation=run.incarnation,
        core=inputs.core,
        tokenizer=inputs.tokenizer,
        scored=scored,
        run_log=run_log,
        replica_id=run.replica_id,
        room=run.room,
        traces=traces,
        superseded=files.beginning,
        resumed_step=resumed_step,
    )
    return Outflow(
        inputs.core,
        config.in_steps(inputs.length.total_steps),
        pushes=pushes,
        saver=saver,
        torch_thread=torch_thread,
        terminate=terminate,
    )


def _seat(run: RunContext) -> StreamConsumer:
    keys = run.keys
    return StreamConsumer(
        run.redis,
        stream=keys.scored,
        consumer_group=TRAINERS,
        name=consumer_name(run.incarnation),
        leases=keys.leases(TRAINERS),
        dead=keys.dead,
        reclaim_every_s=1.0,
        max_deliveries=None,  # entries wait here for a checkpoint, across any number of restarts
    )


def consumer_name(incarnation: int) -> str:
    """Return an incarnation's own consumer name on the scored stream: a stale trainer never reads as a newer one."""
    return f"trainer-{incarnation}"
