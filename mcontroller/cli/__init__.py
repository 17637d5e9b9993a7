"""The command line: ``python -m mcontroller VERB``.

A verb is one module, registered as an entry point of the group ``mcontroller.verbs``::

    [project.entry-points."mcontroller.verbs"]
    topology = "mcontroller.cli.topology"

The first line of its docstring is its line in the list of verbs, and the whole docstring is the text of ``--help``. It
has two functions, ``add_arguments(parser)`` and ``run(arguments) -> int``, which returns the exit status. The list is
made without importing the modules, so a verb can import what it needs at its top.
"""
