"""Layouts and topologies of ranks as pure arithmetic, and the only code that changes Megatron's global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_state.errors import LayoutError as LayoutError
    from parallel_state.errors import MControllerError as MControllerError
    from parallel_state.errors import ParallelStateError as ParallelStateError
    from parallel_state.errors import TopologyError as TopologyError
    from parallel_state.infos import DistGlobalInfo as DistGlobalInfo
    from parallel_state.infos import DistRankInfo as DistRankInfo
    from parallel_state.layout import ParallelLayout as ParallelLayout
    from parallel_state.topology import Topology as Topology
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
