"""Simulated ranks: N ranks of real torch.distributed and Megatron-Core code in one process, one running at a time.

``run_ranks(layout, function, *args)`` runs a function on every rank of a layout. Collectives and transfers are computed
in the process, in the order of the ranks, so that the result is the same every time. A hang is an error that names its
cause, at the moment when no rank can go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_state.simulated.agreement import require_different as require_different
    from parallel_state.simulated.agreement import require_equal as require_equal
    from parallel_state.simulated.errors import AsyncAccessError as AsyncAccessError
    from parallel_state.simulated.errors import CollectiveMismatch as CollectiveMismatch
    from parallel_state.simulated.errors import Deadlock as Deadlock
    from parallel_state.simulated.errors import Disagreement as Disagreement
    from parallel_state.simulated.errors import GroupOrderError as GroupOrderError
    from parallel_state.simulated.errors import KeyNotSet as KeyNotSet
    from parallel_state.simulated.errors import NonMemberError as NonMemberError
    from parallel_state.simulated.errors import SharedStateWarning as SharedStateWarning
    from parallel_state.simulated.errors import SimulationError as SimulationError
    from parallel_state.simulated.errors import UnfinishedCalls as UnfinishedCalls
    from parallel_state.simulated.errors import UnsupportedError as UnsupportedError
    from parallel_state.simulated.ranks import run_ranks as run_ranks
    from parallel_state.simulated.simulation import Simulation as Simulation
    from parallel_state.simulated.trace import CommunicationTrace as CommunicationTrace
    from parallel_state.simulated.trace import Transfer as Transfer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
