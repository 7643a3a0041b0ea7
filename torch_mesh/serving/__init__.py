"""``transformers serve`` with a patched model: opened by any MeshConfig, with the keys of the last conversations kept, and counted."""
