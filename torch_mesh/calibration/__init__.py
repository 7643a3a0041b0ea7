"""Calibrated packing: docs/decisions/0057."""

CALIBRATE_TOKENS = 16384  # of a text that are run, unless another number is given
