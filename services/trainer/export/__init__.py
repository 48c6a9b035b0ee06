"""Exports a checkpoint as a transformers directory with a model card, and uploads it to the Hugging Face Hub."""
