"""``GRPOTrainer`` with the constructor of TRL 1.16: a client that trains with headrace's services.

    from headrace import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=brevity, train_dataset=dataset)
    trainer.train()

    script --inputs, settings--> run --events--> state, callbacks, progress
      ^                           |
      +------ final weights ------+

The run belongs to the services and not to the script: Ctrl-C pauses it, and another ``train()`` continues it.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.client import HeadraceClient, Run
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.hub_upload import Card, complete_card, repository_name, upload
from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_of_script import check_options, data_of_environment
from headrace.grpo.script import Script
from headrace.grpo.script_check import check_script
from headrace.grpo.script_run import ScriptRun
from headrace.grpo.short_traceback import short_on_ctrl_c
from headrace.grpo.trainer_attributes import (
    ELSEWHERE,
    ScriptProcess,
    all_tools,
    as_list,
    check_overrides,
    missing,
    refuse_unsupported,
    reward_func_names,
    reward_tokenizers,
    reward_weights,
)
from headrace.grpo.training_events import TrainingEvents
from shared.run_options.grpo_config import DEFAULT_OUTPUT_DIR, GRPOConfig
from shared.run_options.loss import what_departs_from_gspo

log = logging.getLogger(__name__)


class GRPOTrainer:
    """Trains a model with GRPO. It takes the arguments of TRL's ``GRPOTrainer``: live objects, or names.

    Args:
        model: Hub id, directory, ``PreTrainedModel``, or ``PeftModel`` with a new adapter.
        reward_funcs: Functions, reward models, or names of built-ins, endpoints and ``module:function``; one or a list.
        args: The options. Without them, ``output_dir`` is the model's name and ``-GRPO``, as in TRL.
        train_dataset: ``datasets.Dataset``, iterable of rows, path of a file, or hub id.
        eval_dataset: Data for evaluations, in the same forms. For ``evaluate()`` also a dictionary of several by name.
        processing_class: The tokenizer, if it is not the model's own.
        reward_processing_classes: Tokenizers of reward models, in the order of ``reward_funcs``.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        optimizers: Not supported: options set the optimizer.
        quantization_config: ``BitsAndBytesConfig(load_in_4bit=True)``.
        peft_config: A ``LoraConfig``.
        tools: Functions that the model may call.
        rollout_func: Not supported: write an agent program.
        environment_factory: An environment class, or a dictionary of such classes by name. The column ``environment``
            of each row then chooses one.

    Raises:
        ArgumentError: An argument is not supported. The message says what to do instead.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise ArgumentError for a subclass that overrides a method that only TRL's training would call."""
        super().__init_subclass__(**arguments)
        check_overrides(cls, trainer=GRPOTrainer)

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

        refuse_unsupported(args=args, optimizers=optimizers, rollout_func=rollout_func)
        self.args = args if args is not None else GRPOConfig()
        check_options(self.args)
        self.reward_funcs = as_list(reward_funcs)
        self.reward_processing_classes = reward_tokenizers(
            as_list(reward_processing_classes), num_functions=len(self.reward_funcs)
        )
        if not self.reward_funcs and environment_factory is None:
            raise ArgumentError("No reward source provided: give reward_funcs, or an environment_factory")
        if train_dataset is None:
            train_dataset = data_of_environment(environment_factory, self.args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.tools = all_tools(as_list(tools), environment_factory)
        self.reward_func_names = reward_func_names(self.reward_funcs, environment_factory)
        self.reward_weights = reward_weights(
            self.args.reward_weights, num_functions=len(self.reward_funcs), environment_factory=environment_factory
        )
        self.accelerator = ScriptProcess()
        self.hub_model_id = self.args.hub_model_id
        init_kwargs = cast("Mapping[str, Any]", self.args.model_init_kwargs or {})
        init_kwargs = {"trust_remote_code": self.args.trust_remote_code, **init_kwargs}
        self._live = LiveModel(model, processing_class, peft_config=peft_config, init_kwargs=init_kwargs)
        if args is None:
            self.args.output_dir = f"{self._live.name.rpartition('/')[2]}-GRPO"
        for warning in what_departs_from_gspo(self.args.loss_type, self.args.importance_sampling_level):
            log.warning(warning)
        self._quantization_config = quantization_config
        self._tools, self._environment_factory = as_list(tools), environment_factory
        self._events = TrainingEvents(
            self.args, state=TrainerState(), control=TrainerControl(), context=self._live.as_arguments
        )
        self._training = ScriptRun(self._script, self._events)
        for callback in callbacks or ():
            self.add_callback(callback)
        self._events.fire("on_init_end")

    def _script(self) -> Script:
        """Return the trainer's present arguments, because a script may have replaced data sets and reward functions."""
        functions = as_list(self.reward_funcs)
        return Script(
            model=self._live,
            reward_funcs=functions,
            args=self.args,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            reward_processing_classes=reward_tokenizers(self.reward_processing_classes, num_functions=len(functions)),
            quantization_config=self._quantization_config,
            tools=self._tools,
            environment_factory=self._environment_factory,
        )

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus in the loss after the newest step. With ``use_adaptive_entropy`` it changes."""
        return self._events.newest.get("entropy_coef", self.args.entropy_coef)

    @property
    def state(self) -> Any:
        """A ``transformers.TrainerState``: ``global_step``, ``log_history`` and so on."""
        return self._events.state

    @property
    def control(self) -> Any:
        """The ``transformers.TrainerControl`` that callbacks get, and with which they can stop the training."""
        return self._events.control

    @property
    def client(self) -> HeadraceClient:
        """A client of the services, to read metrics and rollouts of ``run``. Services are started if none run."""
        return self._training.client

    @property
    def run(self) -> Run | None:
        """The training run, as the API shows it; None before ``train()``."""
        return self._training.run

    @property
    def model(self) -> Any:
        """The model object with the trained weights. Until the training ends, these are its newest checkpoint's.

        Raises:
            HeadraceError: The training was interrupted, and has no checkpoint on this machine.
        """
        return self._live.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer: the constructor's argument or, without one, the model's own, loaded at the first access."""
        return self._live.tokenizer

    @property
    def num_generations(self) -> int:
        """Number of completions sampled for each prompt in training."""
        return cast("int", self.args.run_options.get("num_generations", self.args.num_generations))

    @property
    def beta(self) -> float:
        """Weight of the KL divergence from the reference model in the loss; 0 without a reference model."""
        return cast("float", self.args.run_options.get("beta", self.args.beta))

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the training has logged the load-balancing loss of a mixture of experts."""
        return any("aux_loss" in entry for entry in self.state.log_history)

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trained weights of the model, or of its adapter."""
        return sum(weights.numel() for weights in self.model.parameters() if weights.requires_grad)

    def is_world_process_zero(self) -> bool:
        """Return True: a script is one process, and its ranks are in the services."""
        return True

    is_local_process_zero = is_world_process_zero

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add an entry to ``state.log_history``, and call ``on_log`` of callbacks. ``start_time`` has no effect."""
        del start_time
        self._events.log(dict(logs))

    def add_callback(self, callback: Any) -> None:
        """Add a ``transformers.TrainerCallback``, or an instance of a callback class.

        Raises:
            ArgumentError: The object has no method of a callback, such as ``on_log``.
        """
        made: Any = callback() if isinstance(callback, type) else callback
        if not any(name.startswith("on_") for name in dir(made)):
            raise ArgumentError(
                f"{made!r} is not a callback: it has no event of transformers.TrainerCallback, such as on_log"
            )
        self._events.callbacks.append(made)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first instance of a callback class, and return it; None if there is none."""
        return self._events.remove(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first instance of a callback class, if it was added."""
        self._events.remove(callback)

    @short_on_ctrl_c
    def train(
        self,
        resume_from_checkpoint: bool | str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> Any:
        """Train to the end, and return a ``transformers.trainer_utils.TrainOutput``.

        A run that was paused by Ctrl-C goes on. If the script has other settings or functions by now, a new run with
        the new ones continues from the paused run's newest checkpoint. Afterwards ``model`` has the trained weights.

        Args:
            resume_from_checkpoint: True goes on in this way with the run that an earlier process began in
                ``output_dir``. If that run was stopped early, or has more steps to make by now, a new run continues it.
                A text begins a new run from a checkpoint: ``RUN``, ``RUN:STEP``, or a directory. ``max_steps`` includes
                the steps before the checkpoint.
            trial: Not supported: make a trainer for each set of options.
            ignore_keys_for_eval: Has no effect: it names outputs of a forward pass, which an evaluation here does not
                have.

        Raises:
            ArgumentError: An argument or option is refused, or no earlier run was found.
            HeadraceError: The run failed, or a reward function of the script failed too often.
        """
        del ignore_keys_for_eval
        if trial is not None:
            raise ArgumentError(f"trial is not supported: {ELSEWHERE['hyperparameter_search']}")
        source = resume_from_checkpoint or self._training.run is not None
        check_script(self._script(), callbacks=self._events.callbacks, source=source)
        from transformers.trainer_utils import TrainOutput  # seconds, so not before arguments were checked

        began_at = time.monotonic()
        try:
            self._training.begin(resume_from_checkpoint or None)
            first_step = self.state.global_step
            losses = self._training.follow_to_the_end()
        except BaseException:  # Ctrl-C, or an error in a callback
            self._training.leave()
            raise
        self._training.give_weights()
        steps, seconds = self.state.global_step - first_step, time.monotonic() - began_at
        summary = self._training.summary(losses, steps=steps, seconds=seconds)
        self._events.end(summary)
        metrics = {**summary, "epoch": self.state.epoch or 0.0}
        return TrainOutput(self.state.global_step, summary["train_loss"], metrics)

    @short_on_ctrl_c
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the model, and return the metrics. Their names begin with ``metric_key_prefix``.

        Args:
            eval_dataset: Data in a form that the constructor takes, a dictionary of several by name, or a name in the
                trainer's own dictionary. By default, the trainer's ``eval_dataset``.
            ignore_keys: Has no effect: it names outputs of a forward pass, which an evaluation here does not have.
            metric_key_prefix: Beginning of the metrics' names. The name of a data set in a dictionary is added to it.

        Raises:
            ArgumentError: There is nothing to evaluate on, or the training still runs or is paused.
            HeadraceError: The evaluation failed, or the share of lost rollouts, or of completions for which a reward
                function failed, is above ``reward_failure_threshold``.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str) and isinstance(self.eval_dataset, Mapping):
            data = cast("Mapping[str, Any]", self.eval_dataset).get(data, data)
        if isinstance(data, Mapping):
            found: dict[str, float] = {}
            for name, part in cast("Mapping[str, Any]", data).items():
                found |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        metrics = {
            name.replace("eval_", f"{metric_key_prefix}_", 1): value
            for name, value in self._training.evaluate(data).items()
            if name.startswith("eval_") and value is not None
        }
        self._events.take_evaluation(metrics, step=self.state.global_step)
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model and its tokenizer to ``output_dir``, by default ``args.output_dir``.

        From services elsewhere, the trained model is downloaded into it. In a callback and after Ctrl-C, the weights
        are the newest checkpoint's, and a line of output names the checkpoint's step.

        Raises:
            HeadraceError: The training has not reached a checkpoint.
        """
        directory = Path(output_dir) if output_dir else self._output_dir()
        self._training.save_model(directory)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics of ``train()`` or ``evaluate()`` as a table."""
        from transformers import trainer_pt_utils

        cast("Any", trainer_pt_utils).log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to ``{split}_results.json`` in ``output_dir``, and add them to ``all_results.json``."""
        from transformers import trainer_pt_utils

        self._output_dir()
        cast("Any", trainer_pt_utils).save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write ``state`` to ``trainer_state.json`` in ``output_dir``."""
        self.state.save_to_json(str(self._output_dir() / "trainer_state.json"))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Add name, data sets and tags to the model card ``README.md`` in ``output_dir``, or write a new card."""
        file = self._output_dir() / "README.md"
        repository = self.args.hub_model_id or file.parent.name
        complete_card(file, Card(model_name, dataset_name, tags), repository=repository)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> Any:
        """Upload model, tokenizer and model card to the hub, as ``hub_model_id`` or the name of ``output_dir``.

        Returns:
            A ``huggingface_hub.CommitInfo``, which is the commit's URL; with ``blocking=False``, a future of it.
        """
        repository_name(self.args)
        self._events.fire("on_push_begin")
        directory = Path(tempfile.mkdtemp(prefix="push-", dir=self._output_dir()))
        is_under_way = False

        def remove(*_: object) -> None:
            shutil.rmtree(directory, ignore_errors=True)

        try:
            self.save_model(str(directory))
            self.hub_model_id, done = upload(
                directory,
                self.args,
                commit_message=commit_message,
                blocking=blocking,
                token=token,
                revision=revision,
                card=Card(model_name, dataset_name, tags),
            )
            is_under_way = not blocking
        finally:
            if not is_under_way:
                remove()
        if is_under_way:
            done.add_done_callback(remove)
        return done

    def _output_dir(self) -> Path:
        directory = Path(self.args.output_dir or DEFAULT_OUTPUT_DIR)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    if not TYPE_CHECKING:  # for a type checker, an attribute that is missing is missing

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that says why an attribute of TRL's trainer is missing here."""
            if hasattr(type(self), name):  # a property that raised AttributeError: raise its own
                return object.__getattribute__(self, name)
            raise missing(name)
