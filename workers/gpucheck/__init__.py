"""Check a machine with GPUs: the first thing to run on one.

``python -m workers.gpucheck`` needs torch and megatron-core, and no other package. ``python -m mcontroller gpucheck``
is the same program. It compares devices and dtypes, scores, tokens, updates and checkpoints with a reference that a
second process computes on the CPU, and measures memory, host synchronisations and speed. ``docs/gpu.md`` explains every
row.
"""
