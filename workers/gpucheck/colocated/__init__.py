"""Weights between two processes that share a GPU."""
