"""Calibrated packing: docs/decisions/0057."""
