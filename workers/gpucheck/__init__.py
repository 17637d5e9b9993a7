"""Check a machine with GPUs: the first thing to run on one.

Status: run on one H100.

Parts a to c and e of ``python -m mcontroller gpucheck`` need torch, tensordict and megatron-core alone. ``docs/gpu.md``
explains every row.
"""
