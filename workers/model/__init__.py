"""Megatron-Core models on one rank: configuration, layers, initial weights.

Imports ``workers.weights``, which imports nothing from this package.
"""
