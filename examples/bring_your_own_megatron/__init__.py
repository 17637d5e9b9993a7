"""Two ways to put a controller over a team's own Megatron code, which stays as it is.

``team.py`` is that code, in the style of Megatron-LM's scripts. ``loop.py`` runs its loop under a ``MegatronWorker``;
``roles.py`` trains its model with the RL workers. docs/own-megatron.md explains both.
"""

from parallel_state import cpu

cpu.install()  # before Megatron is imported; does nothing on a machine with GPUs
