"""Predict the experts of a layer before its router runs: lookahead and fitted predictors."""
