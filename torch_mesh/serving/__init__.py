"""``transformers serve`` with a patched model, a cache of recent conversations, and metrics."""
