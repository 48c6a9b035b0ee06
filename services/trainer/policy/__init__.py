"""The policy in training: model, passes over packed rows, optimizer, reference model, adapters."""
