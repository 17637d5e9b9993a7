"""Responses made by trajectory: several turns, episodes with tools, and agents behind an endpoint."""
