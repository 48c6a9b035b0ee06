"""TRL's ``GRPOTrainer`` and ``GRPOConfig``, with headrace's services behind them.

grpo_trainer.py     the trainer: a client that submits a run, follows it, and brings its weights back
grpo_config.py      TRL's options as a dataclass
script.py           constructor arguments, and the files that their objects become
run_of_script.py    constructor arguments and options --> a run's settings
script_check.py     mistakes in the arguments, before services start
function_source.py  functions and classes of a script or notebook --> the text of a module
run_inputs.py       live data sets, models and functions --> files that the services read
input_delivery.py   those files --> services on this machine, or over HTTP to others
script_run.py       the training run: begun, found again by another process, followed, paused
run_weights.py      the weights that the run leaves --> the model, and ``save_model``
training_events.py  a run's metrics --> ``state.log_history`` and the events of callbacks
script_services.py  the services of a script, started on this machine when none are named
trainer_attributes.py   what scripts read from TRL's trainer, and why some of it is not here
hub_upload.py       the model --> a repository on the hub
"""
