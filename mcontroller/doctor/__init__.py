"""Check every node of a cluster, or this machine, before a run: the verb ``doctor``.

``node`` reads what a node has, in an agent that runs on it, and ``checks`` judges the facts without any I/O.
"""
