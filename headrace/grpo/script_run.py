"""Begins or finds the training run of a script's trainer, follows it to its end, and pauses it after Ctrl-C.

begin --> run --events--> training_events.py
            |
            +-- headrace-run.json in output_dir, with which another process continues it
"""

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from headrace.client import ENDED, HeadraceApiError, HeadraceClient, Run, Submission
from headrace.event_stream import Event
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.own_code import OwnCode, check_evaluation
from headrace.grpo.resumption import has_made_all_steps, own_steps, replaced, say_differences, without_beginning
from headrace.grpo.run_of_script import evaluation_settings, training_settings
from headrace.grpo.run_weights import RunWeights
from headrace.grpo.script import Files, Script
from headrace.grpo.script_services import ScriptServices, begin_run, find_services, stop_other_run
from headrace.grpo.training_events import TrainingEvents
from headrace.run_file import with_absolute_paths
from headrace.terminal import say
from headrace.watch.watch import final_sentence, follow
from shared.errors import HeadraceError
from shared.run_options.grpo_config import DEFAULT_OUTPUT_DIR

_PIPE_WIDTH: Final = 120
_LINK: Final = "headrace-run.json"
"""File in ``output_dir`` that names the run, so that another process can go on with it."""
_IS_ENDING: Final = "/problems/run-is-ending"


class ScriptRun:
    """The runs of one trainer: one training at a time, and evaluations.

    Args:
        script: Returns the trainer's arguments, which may change between two trainings.
        events: Updates the trainer's state and calls its callbacks for the run's steps and evaluations.
    """

    def __init__(self, script: Callable[[], Script], events: TrainingEvents) -> None:
        self.run: Run | None = None
        """The training run, as the API shows it; None before it began."""
        self._is_begun = False
        """Whether ``begin`` has set ``run`` for the current training. If not, ``leave`` does not pause ``run``."""
        self._script = script
        self._events = events
        self._services: ScriptServices | None = None
        self._files = Files(lambda: self._connected().inputs())
        self._epochs_per_step = 0.0
        self._own_code = OwnCode(script(), {})
        self._weights = RunWeights(script().model, self._connected)
        events.until_saved = self._until_saved

    @property
    def client(self) -> HeadraceClient:
        """An HTTP client of the run API. The services are started if none run."""
        return self._connected().client

    def begin(self, resume: bool | str | None) -> None:
        """Begin a new training run, which may continue an earlier run, or resume the paused run.

        Args:
            resume: True continues this process's run, or else the run that another process began in ``output_dir``. A
                text begins a new run from a checkpoint: ``RUN``, ``RUN:STEP``, or a directory. None continues this
                process's run if it has not ended, and otherwise begins a new run.

        Raises:
            ArgumentError: An argument or option is refused, or no earlier run was found.
        """
        self._is_begun, is_first = False, self.run is None
        earlier = self._run_of_another_process() if is_first and resume is True else self.run
        run = self._begun(resume, earlier)
        self.take_run(run)
        if run["status"] not in ENDED:
            say(f"{run['run_id']} trains with {self._connected().in_words}; it is in {run['run_dir']}")
        self._own_code.follow(run)
        self._events.describe(run, epochs_per_step=self._epochs_per_step)
        if is_first and earlier is not None and earlier["run_id"] == run["run_id"]:
            with self._events.told_before(epochs_per_step=self._epochs_per_step):
                self._catch_up(to_step=int(run["progress"]["step"]))
        self._weights.give_so_far(self._followed())
        self._events.begin(max_steps=int(run["progress"]["max_steps"]), epochs_per_step=self._epochs_per_step)

    def follow_to_the_end(self) -> list[float]:
        """Follow the run to its end, report steps and evaluations to callbacks, and return the losses of all its steps.

        Raises:
            HeadraceError: The run failed, or is paused because code of the script fails.
        """
        run_id = self._followed()["run_id"]
        self._catch_up()
        console = self._console()
        self.run = follow(self.client, run_id, console=console, on_event=self._take, on_run=self._look).run
        if self.run["status"] == "failed":
            raise HeadraceError(final_sentence(self.run))
        steps = self._catch_up()
        self._events.take_best(self.run["progress"].get("best"))
        return [metrics["loss"] for metrics in steps if metrics.get("loss") is not None]

    def leave(self) -> None:
        """Pause the current run after Ctrl-C or an error, and let the model use its newest checkpoint's weights."""
        if not self._is_begun:
            return
        run_id = self._followed()["run_id"]
        try:
            self.client.pause(run_id)
            say(f"{run_id} pauses after its batch; {self._how_to_go_on()}")
        except HeadraceApiError as error:  # it may have ended
            if error.problem.get("type") == _IS_ENDING:
                say(f"{run_id} has made its steps, and ends by itself after its last evaluation and checkpoint")
        self._weights.give_so_far(self._followed())

    def _how_to_go_on(self) -> str:
        return (
            "train() goes on with it. Once this script has ended, run it again with "
            f"train(resume_from_checkpoint=True); the run is in {self._followed()['run_dir']}"
        )

    def _catch_up(self, *, to_step: int | None = None) -> list[dict[str, Any]]:
        """Report to callbacks the steps and evaluations whose events did not arrive, and return all steps' metrics.

        Events can be missing because only the newest 20,000 are kept, 1,000 once the run has ended, or one got lost.
        Steps and evaluations after ``to_step`` are not reported.
        """
        run_id = self._followed()["run_id"]
        steps = self.client.metrics(run_id)
        told = [(self._events.take, metrics) for metrics in steps]
        told += [(self._events.take_evaluation_once, metrics) for metrics in self.client.evaluations(run_id)]
        for take, metrics in sorted(told, key=lambda it: int(it[1]["step"])):
            if to_step is None or int(metrics["step"]) <= to_step:
                take(metrics)
        return steps

    def evaluate(self, data: Any) -> dict[str, Any]:
        """Evaluate the model on ``data`` in a run of its own that makes no steps, and return the metrics.

        Raises:
            ArgumentError: The training is paused or still runs, or there is nothing to evaluate on.
            HeadraceError: The evaluation failed, or too many of its rewards failed or rollouts were lost.
        """
        client = self.client
        training = None if self.run is None else client.get(self.run["run_id"])
        if training is not None and training["status"] not in ENDED:
            if training["status"] == "paused" or training["desired"] == "pause":
                raise ArgumentError("the training is paused, and keeps the generators: train() goes on with it")
            raise ArgumentError(
                "the training still runs, and keeps the generators: set eval_strategy to evaluate while it trains"
            )
        settings, notes = evaluation_settings(self._script(), self._files, data=data)
        submission = begin_run(client, settings, say=say)
        for note in (*notes, *submission.warnings):
            say(f"note: {note}")
        run = follow(client, submission.run_id, console=self._console()).run
        evaluations = client.evaluations(submission.run_id)
        if run["status"] != "finished" or not evaluations:
            raise HeadraceError(final_sentence(run))
        check_evaluation(run, evaluations[-1])
        return evaluations[-1]

    def give_weights(self) -> None:
        """Let the model object use the final weights of the training, which has ended."""
        self._weights.give(self._followed())

    def save_model(self, directory: Path) -> None:
        """Write the model, trained or not, to ``directory``.

        Raises:
            HeadraceError: The training has not ended, and no checkpoint of it is available.
        """
        self._weights.save(self.run, directory)

    def summary(self, losses: Sequence[float], *, steps: int, seconds: float) -> dict[str, float]:
        """Return the metrics with which transformers ends a training, such as ``train_runtime`` and ``train_loss``.

        Args:
            losses: The losses of all steps of the run. Their mean is ``train_loss``.
            steps: Optimizer steps that were made in this call of ``train()``.
            seconds: Duration of this call.
        """
        config = self._followed()["config"]
        completions = steps * config["groups_per_step"] * config["num_generations"]
        return {
            "train_runtime": seconds,
            "train_samples_per_second": completions / seconds,
            "train_steps_per_second": steps / seconds,
            "total_flos": 0.0,
            "train_loss": sum(losses) / len(losses) if losses else 0.0,
        }

    def _followed(self) -> Run:
        assert self.run is not None
        return self.run

    def _connected(self, *, resumed: Path | None = None) -> ScriptServices:
        if self._services is None or resumed not in (None, self._services.state_dir):
            self._services = find_services(resumed=resumed, say=say)
            self._files = Files(lambda: self._connected().inputs())
            weakref.finalize(self, self._services.client.close)
        return self._services

    def take_run(self, run: Run) -> None:
        """Make ``run`` the training run that this object follows."""
        self.run, self._is_begun = run, True

    def _begun(self, resume: bool | str | None, known: Run | None) -> Run:
        """Resume the ``known`` run, or begin a new one, which may begin from a checkpoint. Return the run to follow.

        A new run is stored in ``self.run`` as soon as it is submitted.
        """
        client, old = self.client, None
        earlier = None if known is None or isinstance(resume, str) else client.get(known["run_id"])
        if earlier is not None and not resume and earlier["status"] in ENDED:
            earlier = None
        source = resume if isinstance(resume, str) else None if earlier is None else str(earlier["run_id"])
        model = None if earlier is None or self.run is None else str(earlier["config"]["model"])
        script = self._script()
        settings, notes = self._settings(script, source, model=model)
        self._own_code = OwnCode(script, without_beginning(settings))
        self._own_code.check_columns(script, client)
        if earlier is not None:
            if has_made_all_steps(client, earlier, settings):
                say(f"note: {earlier['run_id']} has made all its steps: nothing is left to train")
                return earlier
            old = replaced(self._connected(), earlier, settings, say=say)
            if old is None:
                self.take_run(earlier)
                run = client.resume(earlier["run_id"])
                stop_other_run(client, run["run_id"], say=say)
                if not run["progress"]["max_steps"]:  # it has waited in the queue so far
                    run["progress"]["max_steps"] = own_steps(client, run, settings) or 0
                say(f"continuing {run['run_id']} from step {run['progress']['step']}")
                return run
            if not old.has_checkpoint:
                source = None
                settings, notes = self._settings(script, source)
        if known is not None:
            self._events.begin_anew(continues=source is not None)
        if "resume_from_checkpoint" in settings:
            settings = with_absolute_paths(settings, Path.cwd())
        elif old is not None:
            settings = without_beginning(settings)
        submission = begin_run(client, settings, say=say, on_begun=self._remember)
        if old is not None and old.run["status"] not in ENDED:
            with contextlib.suppress(HeadraceApiError):  # it has ended, or was stopped as this process's earlier run
                client.stop(old.run["run_id"])
        for note in (*notes, *submission.warnings):
            say(f"note: {note}")
        run = client.get(submission.run_id)
        if old is not None:
            old.say_successor(run, say=say)
        if old is None or not old.says_changes:
            say_differences(client, run, say=say)
        run["progress"]["max_steps"] = submission.derived["steps"]
        return run

    def _settings(
        self, script: Script, source: str | None, *, model: str | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        return training_settings(script, self._files, callbacks=self._events.callbacks, source=source, model=model)

    def _remember(self, submission: Submission) -> None:
        """Follow a new run, and write its id to ``output_dir``, where another process finds it.

        Also computes the epochs per step. If the number of rows is not known, the whole run counts as one epoch.
        """
        assert submission.run is not None
        self.take_run(submission.run)
        derived = submission.derived
        epoch_prompts = derived.get("epoch_prompts") or derived["prompt_groups"]
        self._epochs_per_step = derived["prompt_groups"] / max(1, derived["steps"] * epoch_prompts)
        state_dir = self._connected().state_dir
        link = {
            "run_id": submission.run_id,
            "epochs_per_step": self._epochs_per_step,
            "state_dir": None if state_dir is None else str(state_dir),
        }
        file = self._link()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(link) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"note: train(resume_from_checkpoint=True) will not find this run: {file} cannot be written: {error}")

    def _link(self) -> Path:
        """Return the file in ``output_dir`` that has the id of the newest run."""
        return Path(self._script().args.output_dir or DEFAULT_OUTPUT_DIR) / _LINK

    def _run_of_another_process(self) -> Run:
        file = self._link()
        try:
            link = json.loads(file.read_text(encoding="utf-8"))
            self._epochs_per_step = float(link["epochs_per_step"])
            state_dir = link["state_dir"] and Path(link["state_dir"])
            return self._connected(resumed=state_dir).client.get(link["run_id"])
        except (OSError, ValueError, KeyError, HeadraceApiError) as error:
            why = f"{file} does not exist" if isinstance(error, FileNotFoundError) else f"{file}: {error}"
            raise ArgumentError(
                f"resume_from_checkpoint: no run to go on with: {why}. Call train() without it to begin one"
            ) from None

    def _until_saved(self, step: int) -> None:
        save_steps = self._events.state.save_steps
        self._weights.wait_for_checkpoint(self._followed(), step, save_steps=save_steps)

    def _look(self, run: Run) -> None:
        """Update ``state.max_steps`` from the run, and stop it if a callback has asked for this.

        Raises:
            HeadraceError: The script's own code has paused the run, or the run API is away.
        """
        self._own_code.check(run)
        self._events.state.max_steps = int(run["progress"]["max_steps"]) or self._events.state.max_steps
        self._stop_if_asked()

    def _take(self, event: Event) -> None:
        """Report an event of the run to callbacks, and stop the run if a callback asks for it."""
        if event.kind == "metrics":
            if int(event.data["step"]) > self._events.state.global_step + 1:
                self._catch_up()
            self._events.take(event.data)
        elif event.kind == "evaluation":
            self._events.take_evaluation_once(event.data)
        try:
            self._stop_if_asked()
        except HeadraceApiError as error:  # _look, whose errors are retried for a minute, asks again
            if not error.may_pass:
                raise

    def _stop_if_asked(self) -> None:
        if self._events.control.should_training_stop:
            self.client.stop(self._followed()["run_id"])
            self._events.control.should_training_stop = False

    def _console(self) -> Console:
        console = Console(emoji=False, quiet=bool(self._script().args.disable_tqdm))
        return console if console.is_terminal or console.is_jupyter else Console(emoji=False, width=_PIPE_WIDTH)
