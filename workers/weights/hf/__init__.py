"""Hugging Face checkpoints: configuration, files and names of weights."""
