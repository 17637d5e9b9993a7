"""Hypothesis strategies for layouts and for topologies whose ranks are in any order."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from parallel_state.errors import LayoutError
from parallel_state.infos import DistGlobalInfo, DistRankInfo
from parallel_state.layout import ORDER_AXES, ParallelLayout

ORDERS = ["-".join(axes) for axes in itertools.permutations(ORDER_AXES)]
SIZES = st.sampled_from([1, 2, 3, 4])
# For busy machines; each run draws other examples.
unhurried = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def layouts(draw: st.DrawFn, max_world_size: int = 128, extra: bool = True) -> ParallelLayout:
    """Any legal layout: dense or with experts, any order, with up to two user-defined axes."""
    tp, pp, cp, dp = (draw(SIZES) for _ in range(4))
    extra_axes = draw(st.dictionaries(st.sampled_from(["replica", "island"]), SIZES, max_size=2)) if extra else {}
    arguments: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "extra": extra_axes}
    rest = dp
    for size in (tp, cp):
        rest *= size
    arguments["etp"] = draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))
    rest //= arguments["etp"]
    arguments["ep"] = draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))
    world_size = tp * pp * cp * dp
    for size in extra_axes.values():
        world_size *= size
    if world_size > max_world_size:
        return ParallelLayout(draw(st.integers(1, max_world_size)))
    order = draw(st.permutations([*ORDER_AXES, *extra_axes]))
    try:
        return ParallelLayout(world_size, order="-".join(order), **arguments)
    except LayoutError:  # pp or an extra axis has other groups in the two grids: put them last
        ordered = [axis for axis in order if axis in ("tp", "cp", "ep", "dp")]
        return ParallelLayout(world_size, order="-".join([*ordered, "pp", *extra_axes]), **arguments)


def reports(layout: ParallelLayout) -> tuple[list[DistRankInfo], list[DistGlobalInfo]]:
    """Return the infos that the ranks of a layout report, by rank."""
    rank_infos = []
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        extra = {axis: coordinates.pop(axis) for axis in layout.extra}
        rank_infos.append(DistRankInfo(**{f"{axis}_rank": index for axis, index in coordinates.items()}, extra=extra))
    sizes = {f"{axis}_size": size for axis, size in layout.sizes.items() if axis not in layout.extra}
    info = DistGlobalInfo(**sizes, vpp_size=layout.vpp, extra=layout.extra)
    return rank_infos, [info] * layout.world_size
