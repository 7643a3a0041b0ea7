"""The structure of a model: which modules hold experts, with what layout, router and activation."""
