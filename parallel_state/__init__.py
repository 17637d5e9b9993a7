"""Where am I? Pure rank arithmetic, and the only code that touches Megatron's global state."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_state.errors import LayoutError, ParallelStateError, TopologyError
    from parallel_state.layout import ParallelLayout
    from parallel_state.topology import DistGlobalInfo, DistRankInfo, Topology

_HOME = {
    "ParallelLayout": "layout",
    "Topology": "topology",
    "DistRankInfo": "topology",
    "DistGlobalInfo": "topology",
    "ParallelStateError": "errors",
    "LayoutError": "errors",
    "TopologyError": "errors",
}
__all__ = [
    "DistGlobalInfo",
    "DistRankInfo",
    "LayoutError",
    "ParallelLayout",
    "ParallelStateError",
    "Topology",
    "TopologyError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
