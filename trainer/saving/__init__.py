"""Saving a run: the groups' checkpoints and the record of the run, in an order in which nothing is lost; preemption."""
