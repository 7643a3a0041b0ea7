"""Which experts tokens use: recorded in traces, counted in profiles, replayed by simulations, or synthetic."""
