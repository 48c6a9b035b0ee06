"""TRL's ``GRPOTrainer`` and ``GRPOConfig``, with headrace's services behind them.

grpo_trainer.py        the trainer: a client that submits a run, follows it, and brings its weights back
trainer_attributes.py  arguments and attributes of TRL's trainer: the supported ones, and the reasons for the others
script.py              the constructor's arguments, and the files that their objects become
script_check.py        finds mistakes in the arguments before services start
run_of_script.py       constructor arguments and options --> a run's settings
reward_settings.py     reward functions --> a run's settings
adapter_settings.py    ``peft_config`` and ``quantization_config`` --> a run's settings
definitions.py         a function or class --> its definition in a file or notebook, and the variables that it uses
function_source.py     functions and classes of a script or notebook --> the text of a module
run_inputs.py          live data sets, models and functions --> files that the services read
input_delivery.py      those files --> services on this machine, or over HTTP to others
script_services.py     finds the services for a script, or starts them on this machine
script_run.py          begins the training run or finds it again, follows it, and pauses it
resumption.py          decides whether an earlier run goes on, or a new run continues it
own_code.py            finds missing data columns, and raises failures of the script's own code in the services
training_events.py     a run's metrics --> ``state.log_history`` and the events of callbacks
live_model.py          the script's model and tokenizer as objects
run_weights.py         the weights that the run leaves --> the model, and ``save_model``
hub_upload.py          the model --> a repository on the hub
argument_error.py      the exception for refused arguments
short_traceback.py     shortens the traceback after Ctrl-C

``GRPOConfig``, TRL's options as a dataclass, is in shared/run_options/grpo_config.py.
"""
