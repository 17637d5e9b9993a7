"""Transports in which two ranks send each other messages over a link: shared memory, CUDA IPC, Ray's object store."""
