"""The model in training: its passes, optimizer steps and weights. On every rank, rows of token ids take this path:

policy_core.py            accumulates gradients, and makes the optimizer step; training_core.py is its interface
rank_plan.py              decides which rank computes which rows, and in which passes
rank_passes.py            makes one rank's passes, forward and backward
    microbatches.py       packs rows into arrays
    row_pass.py           makes one forward pass
        policy_module.py      turns token ids into logprobs and entropies (linear_logprobs.py)
        reference_policy.py   has the reference model, for a KL term
    router_loss.py        computes the load-balancing loss of experts; ../objective has the policy loss
trained_weights.py        selects the weights that are pushed, saved and exported

run_models.py builds the models: policy_model.py loads them, lora.py adds adapters, sharding.py spreads them over the
ranks (ranks.py), compiled_layers.py compiles them. packing_check.py tests whether a model can take packed rows.
"""
