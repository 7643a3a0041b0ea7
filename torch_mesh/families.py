"""The public path of ``supported_families``, which is in ``models/families.py``."""

from torch_mesh.models.families import supported_families

__all__ = ["supported_families"]
