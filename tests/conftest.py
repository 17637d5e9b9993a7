"""Megatron-Core is importable from here on, by any test, on a machine without a GPU."""

from parallel_state import cpu

cpu.install()
