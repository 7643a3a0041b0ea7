"""Shared by the tests of what runs on a GPU. Without one the kernels run in Triton's interpreter, on CPU tensors."""

from pool_fixtures import experts_of, open_pool

__all__ = ["experts_of", "open_pool"]
