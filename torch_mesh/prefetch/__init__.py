"""Which experts a layer will need before its router has said so: the next routers, and fitted predictors."""
