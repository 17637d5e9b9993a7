"""Distributed checkpoints: save, load, and what stands beside the weights."""
