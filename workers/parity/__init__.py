"""The cases in which two computations of one model are compared: layouts with one process, a GPU with the CPU.

The parity tests run them on simulated and forked ranks, and ``python -m mcontroller gpucheck`` on GPUs.
"""
