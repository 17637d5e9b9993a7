"""Check every node of a cluster, or this machine, before a run: the verb ``doctor``.

``facts`` reads what a node has, ``nodes`` runs an agent on each node, and ``checks`` judges the facts without any I/O.
"""
