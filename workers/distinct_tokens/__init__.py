"""Rows whose tokens go through a model once: those of a shared prompt, and no padding.

``tokens`` finds them, ``spread`` copies values from tokens to rows, and ``attention`` does so before core attention:
all other layers treat tokens one by one.
"""
