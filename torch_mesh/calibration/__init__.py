"""Calibrated packing: docs/decisions/0057."""

# The most tokens of a text that are run, unless another number is given.
CALIBRATE_TOKENS = 16384
