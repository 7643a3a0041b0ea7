"""Patch a loaded model, a model that from_pretrained opens, or a single layer; and undo it."""
