"""Which responses are trained on: dynamic sampling, and responses that are too long."""
