"""Predict what a model needs and reaches on a machine before it is loaded: sizes, hits, time, fitting, formats."""
