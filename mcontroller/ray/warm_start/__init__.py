"""Warm start: the worker processes of a job on a node are forked from one parent, which has imported torch once.

- ``executable``: the command that Ray starts a worker process with.
- ``client``: what this command runs. It asks the parent for a fork, and starts the parent if there is none.
- ``parent``: imports the libraries, and forks.

A process that cannot be forked (another container, a parent that is not safe to fork) starts as Ray's own do.
"""
