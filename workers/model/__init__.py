"""Megatron-Core models on one rank: configuration, layers, initial weights."""
