"""What a model looks like: which modules hold experts, with what layout, router and activation."""
