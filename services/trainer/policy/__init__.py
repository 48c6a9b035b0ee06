"""The policy that learns: model, passes over packed rows, optimizer, reference, adapters."""
