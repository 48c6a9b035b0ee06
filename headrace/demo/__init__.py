"""The demo: a tiny model learns to reverse strings, first from a careless teacher, then by asynchronous GRPO.

command.py    `headrace demo`: all of the demo, with services on this machine
task.py       prompts and answers in four disjoint splits (plain Python)
demo_task.py  the two variants of the task: answer directly, or call a tool (plain Python)
tools.py      the tool of the second variant (plain Python)
reward.py     the reward function: 1 for the exact answer, in TRL's signature (plain Python)
model.py      the policy: a Qwen3 with half a million weights, and its tokenizer (torch)
warmup.py     imitation of the teacher: afterwards the model can answer, but is often wrong (torch)
evaluate.py   greedy accuracy of a transformers model directory (torch)
settings.py   the run's hyperparameters and the reasons for them (plain Python)
outcome.py    the numbers in the last line of output, and whether they are good enough (plain Python)
curves.py     plots of the run's metrics (matplotlib)
apart.py      makes model and data for services on other machines, and measures accuracy (imports torch when it is used)
"""
