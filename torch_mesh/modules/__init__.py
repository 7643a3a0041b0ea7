"""What patching puts into a model: the patched experts and linear layers, and what stands in them for a parameter."""
