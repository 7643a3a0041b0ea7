"""The version, in a file of its own so that the build can read it without importing the package."""

__version__ = "0.1.0"
