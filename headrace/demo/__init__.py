"""The demo: a tiny model learns to reverse strings, first from a careless teacher, then by asynchronous GRPO.

task.py      what is asked: prompts and answers in four disjoint splits (plain Python)
reward.py    what is rewarded: the exact answer, in TRL's signature (plain Python)
model.py     who is asked: a Qwen3 of half a million weights and its tokenizer (torch)
warmup.py    imitating the teacher, which leaves the model able but often wrong (torch)
evaluate.py  greedy accuracy of any transformers directory (torch)
apart.py     model and data for services that run elsewhere, and the accuracy they reach (plain Python; torch by then)
settings.py  the run's hyperparameters, and why they are what they are (plain Python)
"""
