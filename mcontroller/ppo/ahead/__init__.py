"""Responses that are generated while the policy learns from earlier ones: one step off policy."""
