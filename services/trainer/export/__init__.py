"""A checkpoint as a transformers directory: export, model card, hub, final model."""
