"""Generator replicas without a model, which keep the contract of docs/generator-contract.md by arithmetic only."""
