"""The resident experts of a model: the engine with its owner, its size, and pools for several formats or processes."""
