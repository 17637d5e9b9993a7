"""What a rank reports about itself, and how the reports of all ranks become sizes and columns of indices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from parallel_state.axes import DENSE_AXES, EXPERT_AXES, RESERVED_NAMES, FrozenMap, ranks_text
from parallel_state.errors import TopologyError


@dataclass(frozen=True, slots=True)
class DistRankInfo:
    """Where one rank stands on each axis, as its Megatron groups say.

    `vpp_rank` is the virtual stage that is current on the rank (None without virtual stages); it is no coordinate,
    since a rank holds all its virtual stages. `extra` holds the index on each axis of the user's own.
    """

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    edp_rank: int = 0
    vpp_rank: int | None = None
    extra: Mapping[str, int] = FrozenMap()

    def __post_init__(self) -> None:
        if type(self.extra) is not FrozenMap:
            object.__setattr__(self, "extra", FrozenMap(self.extra))


@dataclass(frozen=True, slots=True)
class DistGlobalInfo:
    """The size of each axis, as one rank knows it.

    `etp_size` and `edp_size` are None where the ranks report no expert grid; then `ep_size` is 1.
    """

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int = 1
    ep_size: int = 1
    etp_size: int | None = None
    edp_size: int | None = None
    vpp_size: int | None = None
    extra: Mapping[str, int] = FrozenMap()

    def __post_init__(self) -> None:
        if type(self.extra) is not FrozenMap:
            object.__setattr__(self, "extra", FrozenMap(self.extra))

    @property
    def has_experts(self) -> bool:
        """Whether the expert grid is reported."""
        return self.etp_size is not None and self.edp_size is not None


def agreed_sizes(infos: Sequence[DistGlobalInfo], label: Callable[[int], str]) -> DistGlobalInfo:
    """The sizes on which all ranks agree; TopologyError names the ranks that differ from most, and on what."""
    _check_types(infos, DistGlobalInfo, label)
    first = infos[0]
    if any(info != first for info in infos):
        raise _disagreement(infos, label)
    for axis in first.extra:
        if not axis.isidentifier() or axis in RESERVED_NAMES:
            raise TopologyError(f"the ranks report an extra axis {axis!r}, which cannot name an axis", axis=axis)
    partial = {name: getattr(first, f"{name}_size") for name in EXPERT_AXES}
    if not first.has_experts and any(size not in (None, 1) for size in partial.values()):
        raise TopologyError(
            f"the ranks report a part of the expert grid only (etp_size {partial['etp']}, ep_size {partial['ep']}, "
            f"edp_size {partial['edp']}); report all three, or none of them with ep_size 1",
            sizes=partial,
        )
    return first


def sizes_of(info: DistGlobalInfo) -> FrozenMap[int]:
    """Axis -> size: the dense axes, the user's own, and the expert axes where they are reported."""
    sizes = {axis: getattr(info, f"{axis}_size") for axis in DENSE_AXES}
    experts = {axis: getattr(info, f"{axis}_size") for axis in EXPERT_AXES if info.has_experts}
    return FrozenMap({**sizes, **info.extra, **experts})


def columns_of(
    infos: Sequence[DistRankInfo], total: DistGlobalInfo, label: Callable[[int], str]
) -> FrozenMap[tuple[int, ...]]:
    """Axis -> the index of every rank, by rank, for the axes whose sizes `total` reports."""
    _check_types(infos, DistRankInfo, label)
    axes = (*DENSE_AXES, *(EXPERT_AXES if total.has_experts else ()))
    by_rank = map(attrgetter(*(f"{axis}_rank" for axis in axes)), infos)
    columns = dict(zip(axes, zip(*by_rank, strict=True), strict=True))
    for rank, info in enumerate(infos):
        if info.extra.keys() != total.extra.keys():
            raise TopologyError(
                f"{label(rank)} reports indices on the extra axes {_names(info.extra)}, and sizes of the extra axes "
                f"{_names(total.extra)}; both must name the same axes",
                ranks=(rank,),
            )
    return FrozenMap({**columns, **{axis: tuple(info.extra[axis] for info in infos) for axis in total.extra}})


def check_virtual_stages(infos: Sequence[DistRankInfo], total: DistGlobalInfo, label: Callable[[int], str]) -> None:
    """TopologyError where virtual stages are declared without a pipeline, or a rank is at one that does not exist."""
    size = total.vpp_size
    if size is not None and (type(size) is not int or size < 1 or total.pp_size == 1):
        raise TopologyError(
            f"the ranks report vpp_size {size!r} with pp_size {total.pp_size}; virtual stages are a whole number of at "
            "least 1 on each of at least 2 pipeline stages",
            vpp_size=size,
            pp_size=total.pp_size,
        )
    for rank, info in enumerate(infos):
        stage = info.vpp_rank
        if stage is not None and (size is None or type(stage) is not int or not 0 <= stage < size):
            declared = "no virtual stages (vpp_size None)" if size is None else f"vpp_size {size} (0 to {size - 1})"
            raise TopologyError(
                f"{label(rank)} reports vpp_rank {stage!r}, and {declared}", ranks=(rank,), vpp_rank=stage
            )


def _check_types(infos: Sequence[Any], expected: type, label: Callable[[int], str]) -> None:
    if all(issubclass(kind, expected) for kind in set(map(type, infos))):
        return
    wrong = next(rank for rank, info in enumerate(infos) if not isinstance(info, expected))
    raise TopologyError(
        f"{label(wrong)} reports {infos[wrong]!r} of type {type(infos[wrong]).__name__}; expected a "
        f"{expected.__name__}",
        ranks=(wrong,),
    )


def _disagreement(infos: Sequence[DistGlobalInfo], label: Callable[[int], str]) -> TopologyError:
    for field in fields(DistGlobalInfo):
        values = [getattr(info, field.name) for info in infos]
        # by text, so that a value that cannot be hashed is still reported
        counts = Counter(map(repr, values)).most_common()
        if len(counts) > 1:
            break
    (usual, usual_count), (odd, _) = counts[0], counts[1]
    ranks = tuple(rank for rank, value in enumerate(values) if repr(value) == odd)
    who = label(ranks[0]) if len(ranks) == 1 else ranks_text(ranks)
    others = f"{usual_count:,} other rank{'s report' if usual_count > 1 else ' reports'}"
    return TopologyError(
        f"the ranks disagree on {field.name}: {who} report{'s' if len(ranks) == 1 else ''} {odd}, {others} {usual}",
        ranks=ranks,
        field=field.name,
    )


def _names(extra: Mapping[str, int]) -> str:
    return ", ".join(extra) or "(none)"
