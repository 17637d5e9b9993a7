"""Weights: the slice of each that a rank has, and how they move between layouts, devices and formats."""
