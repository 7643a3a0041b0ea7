"""What touches transformers: its config, cache, attention, compilation, saving and parallelism, for a patched model."""
