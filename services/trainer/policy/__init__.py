"""The model in training: its passes, optimizer steps and weights. On every rank, rows of token ids take this path:

policy_core.py            accumulates gradients, and makes the optimizer step; training_core.py is its interface
rank_plan.py              which rank computes which rows, and in which passes
rank_passes.py            one rank's passes, forward and backward
    microbatches.py       rows to packed arrays
    row_pass.py           one forward pass
        policy_module.py      token ids to logprobs and entropies (linear_logprobs.py)
        reference_policy.py   logprobs of the reference, for a KL term
    router_loss.py        load balance of experts; ../objective has the loss
trained_weights.py        what is pushed, saved and exported

run_models.py builds the models: policy_model.py loads them, lora.py adds adapters, sharding.py spreads them over the
ranks (ranks.py), compiled_layers.py compiles them. packing_check.py tests whether a model can take packed rows.
"""
