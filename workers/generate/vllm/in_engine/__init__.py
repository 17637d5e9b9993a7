"""Files that run in the processes of an engine; the worker starts ``serve_engine.py`` by its path.

They do not import this project: importing ``workers`` changes torch for Megatron on a CPU.
"""
