"""The coordinates and axis sizes that each rank reports, and their merging into sizes and columns of indices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from parallel_state.axes import DENSE_AXES, EXPERT_AXES, FrozenMap, ranks_text
from parallel_state.errors import TopologyError

Label = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class DistRankInfo:
    """The index of one rank on each axis, as its Megatron groups report it.

    Attributes:
        tp_rank: tensor-parallel index.
        dp_rank: data-parallel index.
        pp_rank: pipeline stage.
        cp_rank: context-parallel index.
        ep_rank: expert-parallel index.
        etp_rank: tensor-parallel index in the expert grid.
        edp_rank: data-parallel index in the expert grid.
        vpp_rank: the virtual stage that is current on the rank; None without virtual stages. It is not a
            coordinate: a rank runs all of its virtual stages.
        extra: the index on each user-defined axis.
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
        object.__setattr__(self, "extra", FrozenMap(self.extra))


@dataclass(frozen=True, slots=True)
class DistGlobalInfo:
    """The size of each axis, as one rank reports it.

    Attributes:
        tp_size: tensor-parallel size.
        dp_size: data-parallel size.
        pp_size: number of pipeline stages.
        cp_size: context-parallel size.
        ep_size: expert-parallel size; 1 if the rank reports no expert grid.
        etp_size: tensor-parallel size of the expert grid; None if the rank reports no expert grid.
        edp_size: data-parallel size of the expert grid; None if the rank reports no expert grid.
        vpp_size: number of virtual stages on each pipeline stage; None without virtual stages.
        extra: the size of each user-defined axis.
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
        object.__setattr__(self, "extra", FrozenMap(self.extra))

    @property
    def has_experts(self) -> bool:
        """Whether the rank reports the expert grid."""
        return self.etp_size is not None and self.edp_size is not None


def agreed_sizes(infos: Sequence[DistGlobalInfo], label: Label) -> DistGlobalInfo:
    """Return the sizes that all ranks report.

    Args:
        infos: one report per rank, by rank.
        label: the text with which messages name a rank.

    Raises:
        TopologyError: the ranks report different sizes (the message names the ranks that differ from the majority), or
            part of the expert grid.
    """
    first = infos[0]
    if any(info != first for info in infos):
        raise _disagreement(infos, label)
    expert_sizes = {name: getattr(first, f"{name}_size") for name in EXPERT_AXES}
    if not first.has_experts and any(size not in (None, 1) for size in expert_sizes.values()):
        raise TopologyError(
            f"the ranks report only part of the expert grid (etp_size {expert_sizes['etp']}, ep_size "
            f"{expert_sizes['ep']}, edp_size {expert_sizes['edp']}); report all three, or none of them with ep_size 1",
            sizes=expert_sizes,
        )
    return first


def sizes_of(info: DistGlobalInfo) -> FrozenMap[int]:
    """Return axis -> size: the dense axes, the user-defined axes, and the expert axes if they are reported."""
    sizes = {axis: getattr(info, f"{axis}_size") for axis in DENSE_AXES}
    experts = {axis: getattr(info, f"{axis}_size") for axis in EXPERT_AXES if info.has_experts}
    return FrozenMap({**sizes, **info.extra, **experts})


def columns_of(infos: Sequence[DistRankInfo], sizes: DistGlobalInfo, label: Label) -> FrozenMap[tuple[int, ...]]:
    """Return axis -> the index of every rank, by rank, for the axes that ``sizes`` reports.

    Args:
        infos: one report per rank, by rank.
        sizes: the sizes that all ranks report.
        label: the text with which messages name a rank.

    Raises:
        TopologyError: a rank reports indices on other user-defined axes than those in ``sizes``.
    """
    axes = (*DENSE_AXES, *(EXPERT_AXES if sizes.has_experts else ()))
    by_rank = map(attrgetter(*(f"{axis}_rank" for axis in axes)), infos)
    columns = dict(zip(axes, zip(*by_rank, strict=True), strict=True))
    for rank, info in enumerate(infos):
        if info.extra.keys() != sizes.extra.keys():
            raise TopologyError(
                f"{label(rank)} reports indices on the extra axes {_names(info.extra)}, and sizes of the extra axes "
                f"{_names(sizes.extra)}; both must name the same axes",
                ranks=(rank,),
            )
    return FrozenMap({**columns, **{axis: tuple(info.extra[axis] for info in infos) for axis in sizes.extra}})


def _disagreement(infos: Sequence[DistGlobalInfo], label: Label) -> TopologyError:
    for field in fields(DistGlobalInfo):
        values = [getattr(info, field.name) for info in infos]
        # by repr, because a reported value may not be hashable
        counts = Counter(map(repr, values)).most_common()
        if len(counts) > 1:
            break
    (usual, usual_count), (odd, _) = counts[0], counts[1]
    ranks = tuple(rank for rank, value in enumerate(values) if repr(value) == odd)
    odd_ranks = label(ranks[0]) if len(ranks) == 1 else ranks_text(ranks)
    others = f"{usual_count:,} other rank{'s report' if usual_count > 1 else ' reports'}"
    return TopologyError(
        f"the ranks disagree on {field.name}: {odd_ranks} report{'s' if len(ranks) == 1 else ''} {odd}, {others} "
        f"{usual}",
        ranks=ranks,
        field=field.name,
    )


def _names(extra: Mapping[str, int]) -> str:
    return ", ".join(extra) or "(none)"
