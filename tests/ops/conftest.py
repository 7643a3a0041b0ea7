"""Shared by the tests of the ops."""

from pool_fixtures import experts_of, open_pool

__all__ = ["experts_of", "open_pool"]
