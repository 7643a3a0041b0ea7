"""Which experts tokens take: recorded in traces, counted in profiles, replayed by simulations, or synthetic."""
