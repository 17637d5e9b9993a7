"""Reward functions of users in separate processes, with a deadline for every sample."""
