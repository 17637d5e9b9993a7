"""Responses of several turns: the policy writes tokens, an environment replies with tokens, such as a tool's output."""
