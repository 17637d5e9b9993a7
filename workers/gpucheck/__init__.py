"""Check a machine with GPUs: the first thing to run on one.

Status: tested on a fake CUDA device only.

``python -m workers.gpucheck`` is ``python -m mcontroller gpucheck``, and its parts a to c need torch and megatron-core
alone. ``docs/gpu.md`` explains every row. ``cases`` has what the parity tests compare too.
"""
