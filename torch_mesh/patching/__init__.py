"""How a model is patched: one that is loaded, one that from_pretrained opens, a layer by itself; and how that is
undone."""
