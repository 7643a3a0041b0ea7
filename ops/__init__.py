"""The ops ``torch.ops.torch_mesh.*``: schemas and CPU kernels are in csrc/bindings, fakes and formulas are here.

``experts_split`` is defined here as a whole.

Importing this package registers the fake kernels.
"""

from torch_mesh.ops import attention, dense, experts, experts_split, linear, low_rank, pack, residency, tables

__all__ = ["attention", "dense", "experts", "experts_split", "linear", "low_rank", "pack", "residency", "tables"]
