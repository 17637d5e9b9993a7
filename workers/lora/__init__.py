"""Adapters of low rank, and which weights are trained."""
