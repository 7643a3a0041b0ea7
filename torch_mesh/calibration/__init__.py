"""Packing by what a text shows the experts: docs/decisions/0057."""
