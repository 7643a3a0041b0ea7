"""The data plane, ``torch.ops.torch_mesh.*``: schemas and CPU kernels are in csrc/bindings, the rest of each op is here.

``experts_split`` is here as a whole: it launches Triton kernels (``experts_triton``, imported when a model has experts on a GPU).

Importing this package registers the fake kernels.
"""

from . import attention, dense, experts, experts_split, linear, low_rank, pack, residency

__all__ = ["attention", "dense", "experts", "experts_split", "linear", "low_rank", "pack", "residency"]
