"""Generator replicas without a model: the contract of docs/generator-contract.md, kept by arithmetic."""
