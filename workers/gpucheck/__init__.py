"""Check a machine with GPUs: the first thing to run on one.

Status: run on one H100.

``cases`` is the table that the parity tests share. Parts a to c of ``python -m mcontroller gpucheck`` need torch,
tensordict and megatron-core alone. ``docs/gpu.md`` explains every row.
"""
