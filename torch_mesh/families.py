"""The public path of ``supported_families``; how a model's experts are found is in ``models/families.py``."""

from .models.families import supported_families

__all__ = ["supported_families"]
