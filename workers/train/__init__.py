"""Training steps: token batches, micro-batches, losses, the optimizer."""
