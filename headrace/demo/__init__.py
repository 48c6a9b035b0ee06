"""The demo: a tiny model learns to reverse strings, first from a careless teacher, then by asynchronous GRPO.

task.py      prompts and answers in four disjoint splits (plain Python)
reward.py    the reward function: 1 for the exact answer, in TRL's signature (plain Python)
model.py     the policy: a Qwen3 with half a million weights, and its tokenizer (torch)
warmup.py    imitation of the teacher: afterwards the model can answer, but is often wrong (torch)
evaluate.py  greedy accuracy of a transformers model directory (torch)
apart.py     makes model and data for services on other machines, and measures accuracy (imports torch when it is used)
settings.py  the run's hyperparameters and the reasons for them (plain Python)
"""
