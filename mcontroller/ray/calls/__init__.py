"""Calls on worker processes: how they are sent, awaited and answered, and how they fail."""
