"""Modes that trade exactness for fewer reads: docs/lossy.md."""

from torch_mesh.lossy.decoding import ROUTING_BIAS_FAMILIES

__all__ = ["ROUTING_BIAS_FAMILIES"]
