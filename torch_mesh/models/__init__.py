"""What a model looks like: which modules hold experts, in what layout, with what router and activation."""
