"""Runs from one command: the configuration of a run, its parts, and the verbs that start, resume and export it."""
