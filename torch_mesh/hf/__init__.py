"""The parts of a patched model that touch transformers: config, cache, attention, compilation, saving, parallelism."""
