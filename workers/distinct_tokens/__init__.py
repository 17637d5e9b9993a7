"""Rows whose tokens go through a model once: those of a shared prompt, and no padding.

``prompts`` finds the rows that repeat a prompt and ``tokens`` the tokens to compute, ``spread`` copies values from
tokens to rows, and ``attention`` does so before core attention: all other layers treat tokens one by one.
"""
