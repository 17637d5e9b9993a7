"""Check every node of a cluster, or this machine, before a run: the verb ``doctor``.

``facts`` reads what a node has, ``agent`` runs on each node, ``nodes`` starts the agents through Ray, and
``node_checks`` and ``cluster_checks`` judge the facts without any I/O.
"""
