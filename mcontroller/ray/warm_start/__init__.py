"""Warm start: the worker processes of a job on a node are forked from one parent, which has imported torch once.

- ``executable``: the command that Ray starts a worker process with.
- ``client``: what this command runs. It asks the parent for a fork, and starts the parent if there is none.
- ``parent``: imports the libraries, and forks.

Measured with four ranks that import torch and tensordict, on 2 busy cores, beside ``warm_start=False``: a start takes 3
to 13 s instead of 22 to 27 s, and a restart after a failure 4 to 6 s instead of 19 to 23 s. Only a parent learns how a
process has ended, so ``WorkerDied.exit_cause`` needs it too.

A process that cannot be forked (another container, a parent that is not safe to fork) starts as Ray's own do.
"""
