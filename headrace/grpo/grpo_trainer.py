"""``GRPOTrainer`` with the constructor of TRL 1.16: a client that trains with headrace's services.

    from headrace import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=brevity, train_dataset=dataset)
    trainer.train()

    script --inputs, settings--> run --events--> state, callbacks, progress
      ^                           |
      +------ final weights ------+

The run belongs to the services and not to the script: Ctrl-C pauses it, and ``train()`` goes on with it.
"""

import contextlib
import json
import math
import os
import shutil
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from headrace.client import ENDED, HeadraceApiError, HeadraceClient, Run, Submission
from headrace.event_stream import Event
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_of_script import Files, Script, data_of_environment, evaluation_settings, training_settings
from headrace.grpo.script_services import ScriptServices, begin_run, find_services
from headrace.grpo.training_events import TrainingEvents
from headrace.terminal import say
from headrace.watch.watch import final_sentence, follow
from services.trainer.checkpoints.best_checkpoint import BestCheckpoint, BestRule
from shared.errors import HeadraceError
from shared.run_options.from_trl import INSTEAD
from shared.run_options.grpo_config import GRPOConfig
from shared.run_options.run_config import parse_run_config
from shared.run_options.section import steps_of

_PIPE_WIDTH: Final = 120
_LINK: Final = "headrace-run.json"
"""File in ``output_dir`` that names the run, so that another process can go on with it."""


class GRPOTrainer:
    """Trains a model with GRPO. It takes the arguments of TRL's ``GRPOTrainer``: live objects, or names.

    Args:
        model: Hub id, directory, ``PreTrainedModel``, or ``PeftModel`` with a new adapter.
        reward_funcs: Functions, reward models, or names of built-ins, endpoints and ``module:function``; one or a list.
        args: The options.
        train_dataset: ``datasets.Dataset``, iterable of rows, path of a file, or hub id.
        eval_dataset: The same, for evaluations; ``evaluate()`` also takes several by name.
        processing_class: The tokenizer, if it is not the model's own.
        reward_processing_classes: Tokenizers of reward models, in the order of ``reward_funcs``.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        optimizers: Not supported: options set the optimizer.
        quantization_config: ``BitsAndBytesConfig(load_in_4bit=True)``.
        peft_config: A ``LoraConfig``.
        tools: Functions that the model may call.
        rollout_func: Not supported: write an agent program.
        environment_factory: Class of an environment.

    Raises:
        ArgumentError: An argument is not supported. The message says what to do instead.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        from transformers import TrainerControl, TrainerState

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ArgumentError(
                "this script runs in several processes, and each would begin a run: start it with python, and set the "
                "number of training processes with run_options={'nproc_per_node': N}"
            )
        if tuple(optimizers) != (None, None):
            raise ArgumentError(f"optimizers is not supported: {INSTEAD['optim_args']}")
        if rollout_func is not None:
            raise ArgumentError(f"rollout_func is not supported: {INSTEAD['rollout_func']}")
        self.args = args if args is not None else GRPOConfig()
        self.reward_funcs = _as_list(reward_funcs)
        self.reward_processing_classes = _as_list(reward_processing_classes) or [None] * len(self.reward_funcs)
        if len(self.reward_processing_classes) != len(self.reward_funcs):
            raise ArgumentError(
                f"The number of reward processing classes ({len(self.reward_processing_classes)}) must match the "
                f"number of reward functions ({len(self.reward_funcs)}); None stands for a model's own tokenizer"
            )
        if not self.reward_funcs and environment_factory is None:
            raise ArgumentError("No reward source provided: give reward_funcs, or an environment_factory")
        if train_dataset is None:
            train_dataset = data_of_environment(environment_factory, self.args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.run: Run | None = None
        """The training run, as the API shows it; None before ``train()``."""
        init_kwargs = cast("Mapping[str, Any]", self.args.model_init_kwargs or {})
        self._live = LiveModel(model, processing_class, peft_config=peft_config, init_kwargs=init_kwargs)
        self._script = Script(
            model=self._live,
            reward_funcs=self.reward_funcs,
            args=self.args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_processing_classes=self.reward_processing_classes,
            quantization_config=quantization_config,
            tools=_as_list(tools),
            environment_factory=environment_factory,
        )
        self._services: ScriptServices | None = None
        self._files = Files(lambda: self._connected().inputs())
        self._epochs_per_step = 0.0
        self._told_evaluations = set[int]()
        self._events = TrainingEvents(
            self.args, state=TrainerState(), control=TrainerControl(), context=self._live.as_arguments
        )
        for callback in callbacks or ():
            self.add_callback(callback)
        self._events.fire("on_init_end")

    @property
    def state(self) -> Any:
        """A ``transformers.TrainerState``: ``global_step``, ``log_history`` and so on."""
        return self._events.state

    @property
    def client(self) -> HeadraceClient:
        """A client of the services, to read metrics and rollouts of ``run``. Services are started if none run."""
        return self._connected().client

    @property
    def model(self) -> Any:
        """The model as an object, with the weights of the last training."""
        return self._live.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self._live.tokenizer

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the training logs the load-balancing loss of a mixture of experts."""
        return any("aux_loss" in entry for entry in self.state.log_history)

    def add_callback(self, callback: Any) -> None:
        """Add a ``transformers.TrainerCallback``, or a class of one."""
        self._events.callbacks.append(callback() if isinstance(callback, type) else callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train to the end, and return a ``transformers.trainer_utils.TrainOutput``.

        A run that was paused by Ctrl-C goes on. Afterwards ``model`` has the trained weights.

        Args:
            resume_from_checkpoint: True goes on with the run that a process before this one began in ``output_dir``.

        Raises:
            ArgumentError: An argument or option is refused, or no earlier run was found.
            HeadraceError: The run failed.
        """
        from transformers.trainer_utils import TrainOutput

        if isinstance(resume_from_checkpoint, str):
            raise ArgumentError(
                "resume_from_checkpoint is True or False: a run goes on from its own newest checkpoint; to begin with "
                "the weights of a directory, give it as model"
            )
        began_at = time.monotonic()
        run = self.run = self._begun(resume=bool(resume_from_checkpoint))
        client = self.client
        events, first_step = self._events, self.state.global_step
        self._describe(run)
        events.begin(max_steps=int(run["progress"]["max_steps"]), epochs_per_step=self._epochs_per_step)
        try:
            self.run = follow(client, run["run_id"], console=self._console(), on_event=self._take).run
        except BaseException:  # Ctrl-C, or an error in a callback
            with contextlib.suppress(HeadraceApiError):
                client.pause(run["run_id"])
                say(f"{run['run_id']} pauses after its batch; train() goes on with it, or `headrace resume`")
            raise
        if self.run["status"] == "failed":
            raise HeadraceError(final_sentence(self.run))
        losses = self._take_what_was_missed(client)
        events.take_best(self.run["progress"].get("best"))
        self._bring_weights_back(Path(self.run["run_dir"]) / "model")
        seconds = time.monotonic() - began_at
        loss = sum(losses) / len(losses) if losses else 0.0
        steps = self.state.global_step - first_step
        completions = steps * self.run["config"]["groups_per_step"] * self.run["config"]["num_generations"]
        summary = {
            "train_runtime": seconds,
            "train_samples_per_second": completions / seconds,
            "train_steps_per_second": steps / seconds,
            "total_flos": 0.0,
            "train_loss": loss,
        }
        events.end(summary)
        return TrainOutput(self.state.global_step, loss, summary)

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the model, and return the metrics. Their names begin with ``metric_key_prefix``.

        Args:
            eval_dataset: Rows to evaluate on, or a dictionary of such; by default, the trainer's.
            metric_key_prefix: Beginning of the metrics' names. The name of a data set in a dictionary is added to it.

        Raises:
            ArgumentError: There is nothing to evaluate on.
            HeadraceError: The evaluation failed.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, Mapping):
            found: dict[str, float] = {}
            for name, part in cast("Mapping[str, Any]", data).items():
                found |= self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        client = self.client
        if self.run is not None and client.get(self.run["run_id"])["status"] not in ENDED:
            raise ArgumentError("the training is paused, and keeps the generators: train() goes on with it")
        settings = evaluation_settings(self._script, self._files, data=data)
        submission = begin_run(client, settings, say=say)
        run = follow(client, submission.run_id, console=self._console()).run
        evaluations = client.evaluations(submission.run_id)
        if run["status"] != "finished" or not evaluations:
            raise HeadraceError(final_sentence(run))
        metrics = {
            name.replace("eval_", f"{metric_key_prefix}_", 1): value
            for name, value in evaluations[-1].items()
            if name.startswith("eval_") and value is not None
        }
        self._events.take_evaluation(metrics, step=self.state.global_step)
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model and its tokenizer to ``output_dir``, by default that of the options."""
        directory = output_dir or self.args.output_dir
        if directory is None:
            raise ArgumentError("save_model needs a directory: give output_dir")
        if self._live.trained is None:
            self._live.save(Path(directory))
        else:
            shutil.copytree(self._live.trained, directory, dirs_exist_ok=True)

    def push_to_hub(self, commit_message: str = "End of training") -> str:
        """Upload the model to the hub as ``hub_model_id``, by default the name of ``output_dir``; return its URL."""
        from huggingface_hub import HfApi

        name = self.args.hub_model_id or Path(self.args.output_dir or "").name
        if not name:
            raise ArgumentError("push_to_hub needs a name: set hub_model_id")
        api = HfApi(token=self.args.hub_token)
        repository = api.create_repo(name, private=self.args.hub_private_repo, exist_ok=True).repo_id
        directory = Path(self.args.output_dir or ".headrace") / "model"
        self.save_model(str(directory))
        return str(api.upload_folder(repo_id=repository, folder_path=directory, commit_message=commit_message))

    def _connected(self, *, resumed: Path | None = None) -> ScriptServices:
        if self._services is None:
            self._services = find_services(resumed=resumed, say=say)
            weakref.finalize(self, self._services.client.close)
        return self._services

    def _begun(self, *, resume: bool) -> Run:
        """Return the run to follow: the paused run, or a new one."""
        if resume and self.run is None:
            self.run = self._run_of_another_process()
        client = self.client
        if self.run is not None:
            run = client.get(self.run["run_id"])
            if run["status"] not in ENDED or (run["status"] == "failed" and resume):
                return client.resume(run["run_id"])
            if resume:
                raise ArgumentError(f"resume_from_checkpoint: {run['run_id']} is {run['status']} and cannot go on")
            self.state.global_step = 0
            self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
            self._told_evaluations.clear()
        settings, notes = training_settings(self._script, self._files, callbacks=self._events.callbacks)
        submission = begin_run(client, settings, say=say)
        for note in (*notes, *submission.warnings):
            say(f"note: {note}")
        derived = submission.derived
        self._epochs_per_step = derived["prompt_groups"] / max(1, derived["steps"] * derived["num_rows"])
        self._remember(submission)
        run = client.get(submission.run_id)
        run["progress"]["max_steps"] = derived["steps"]
        return run

    def _describe(self, run: Run) -> None:
        """Put the run's settings into the state, and let it follow the best evaluation."""
        config = parse_run_config(run["config"])
        state, steps = self.state, max(1, int(run["progress"]["max_steps"]))
        state.num_train_epochs = math.ceil(steps * self._epochs_per_step)
        state.logging_steps = max(1, steps_of(self.args.logging_steps, steps))
        state.save_steps = max(1, steps_of(config.save_steps, steps))
        state.eval_steps = state.save_steps if config.eval_steps is None else max(1, steps_of(config.eval_steps, steps))
        state.train_batch_size = config.groups_per_step * config.num_generations
        rule = BestRule.of(config)
        if not self._told_evaluations:
            best = None if rule is None else BestCheckpoint(rule)
            self._events.find_best(best, checkpoints=f"{run['run_dir']}/checkpoints")

    def _remember(self, submission: Submission) -> None:
        if self.args.output_dir is not None:
            directory = Path(self.args.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            state_dir = self._connected().state_dir
            link = {
                "run_id": submission.run_id,
                "epochs_per_step": self._epochs_per_step,
                "state_dir": None if state_dir is None else str(state_dir),
            }
            (directory / _LINK).write_text(json.dumps(link) + "\n", encoding="utf-8")

    def _run_of_another_process(self) -> Run:
        file = Path(self.args.output_dir or ".") / _LINK
        try:
            link = json.loads(file.read_text(encoding="utf-8"))
            self._epochs_per_step = float(link["epochs_per_step"])
            state_dir = link["state_dir"] and Path(link["state_dir"])
            return self._connected(resumed=state_dir).client.get(link["run_id"])
        except (OSError, ValueError, KeyError, HeadraceApiError) as error:
            raise ArgumentError(f"resume_from_checkpoint: no run to go on with ({file}: {error})") from error

    def _take(self, event: Event) -> None:
        """Tell callbacks of an event of the run."""
        if event.kind == "metrics":
            self._take_metrics(event.data)
        elif event.kind == "evaluation":
            self._take_evaluation(event.data)
        if self._events.control.should_training_stop and self.run is not None:
            self.client.stop(self.run["run_id"])
            self._events.control.should_training_stop = False

    def _take_metrics(self, metrics: Mapping[str, Any]) -> None:
        every = self.args.logging_steps
        steps = int(every) if every >= 1 else math.ceil(every * self.state.max_steps)
        save_steps = steps_of((self.run or {})["config"]["save_steps"], self.state.max_steps)
        self._events.take(metrics, logging_steps=max(1, steps), save_steps=max(1, save_steps))

    def _take_evaluation(self, metrics: Mapping[str, Any]) -> None:
        step = int(metrics["step"])
        if step not in self._told_evaluations:
            self._told_evaluations.add(step)
            self._events.take_evaluation(metrics, step=step)

    def _take_what_was_missed(self, client: HeadraceClient) -> list[float]:
        """Take steps and evaluations whose events did not arrive, and return the loss of every step."""
        run_id = (self.run or {})["run_id"]
        steps = client.metrics(run_id)
        for metrics in steps:
            self._take_metrics(metrics)
        for metrics in client.evaluations(run_id):
            self._take_evaluation(metrics)
        return [metrics["loss"] for metrics in steps if metrics.get("loss") is not None]

    def _bring_weights_back(self, directory: Path) -> None:
        if directory.is_dir():
            self._live.take(directory)
        else:
            say(f"note: the trained model is on the services' machine, in {directory}; `model` has the old weights")

    def _console(self) -> Console:
        console = Console(emoji=False, quiet=bool(self.args.disable_tqdm))
        return console if console.is_terminal or console.is_jupyter else Console(emoji=False, width=_PIPE_WIDTH)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*cast("Sequence[Any]", value)] if isinstance(value, (list, tuple)) else [value]
