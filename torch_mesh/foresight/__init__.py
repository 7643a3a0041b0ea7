"""Which experts a model is going to use: told by routers, fitted, profiled, recorded, simulated."""
