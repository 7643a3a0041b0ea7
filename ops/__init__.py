"""The data plane, ``torch.ops.torch_mesh.*``: schemas and CPU kernels are in csrc/bindings, the rest of each op is here.

Importing this package registers the fake kernels.
"""

from . import attention, dense, experts, linear, pack, residency

__all__ = ["attention", "dense", "experts", "linear", "pack", "residency"]
