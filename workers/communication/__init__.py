"""Bytes that ranks communicate, from configurations alone."""
