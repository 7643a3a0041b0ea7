"""Patched experts, patched linear layers, and the packed weights that replace their parameters."""
