"""Check a machine with GPUs: the first thing to run on one.

Status: run on one H100.

Parts a to c of ``python -m mcontroller gpucheck`` need torch and megatron-core alone. ``docs/gpu.md`` explains every
row. ``cases`` has what the parity tests compare too.
"""
