"""What a dry run found: the memory of each stage, what the ranks communicate, and what failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from parallel_state.dry_run.errors import DoesNotFit, DryRunError
from parallel_state.dry_run.memory import KINDS
from parallel_state.dry_run.transformer_engine import VERSION
from parallel_state.layout import ParallelLayout

GIB = 2**30
GPUS = {
    "A100-40": 39.4, "A100": 79.1, "H100": 79.1, "H20": 95.1, "H200": 139.8, "B200": 178.3, "L40S": 44.4,
}  # fmt: skip
"""Name of a GPU -> its memory in units of 2**30 bytes, as CUDA reports it."""
_LAYERS = {
    "transformer_engine": f"what Transformer Engine {VERSION} saves and keeps is counted",
    "local": "those of plain PyTorch are counted",
}
CONTEXT = GIB // 2
"""[bytes] What CUDA takes of a GPU for each process."""


def gpu_bytes(text: str) -> int:
    """Return the memory of a GPU that is named, or given in units of 2**30 bytes.

    Raises:
        DryRunError: it is neither.
    """
    try:
        size = GPUS[text.upper()] if text.upper() in GPUS else float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise DryRunError(
            f"no GPU is named {text!r}: expected one of {', '.join(GPUS)}, or its memory in GiB, as in 79.1", gpu=text
        )
    return int(size * GIB)


@dataclass(frozen=True)
class Use:
    """What a rank used in a step.

    Attributes:
        weights: their number on the rank.
        idle: bytes of each kind before the step.
        peak: the most bytes during the step.
        by_kind: bytes of each kind then.
        module: the module that ran then, by its name in the model and its class; empty outside of modules.
        line: the line that ran then.
        flops: of the step.
        read: how many unknown values were read, by the line and what it did.
        unneeded: of a role's call, bytes of the parts that it does not compute with; they can be in host memory.
        on_host: of a role's call, bytes of the optimizer's state that are in host memory, and counted nowhere else.
        experts: the number of weights of experts, which are divided over other ranks than the rest.
        trained: the number of weights with gradients.
        trained_experts: those of experts among them.
        layers: whose layers were counted: ``"transformer_engine"`` or ``"local"``.
    """

    weights: int
    idle: dict[str, int]
    peak: int
    by_kind: dict[str, int]
    module: str
    line: str
    flops: int
    read: dict[tuple[str, str], int]
    unneeded: int = 0
    on_host: int = 0
    experts: int = 0
    trained: int = 0
    trained_experts: int = 0
    layers: str = "local"

    def plus(self, factor: float, other: Use, base: Use) -> Use:
        """Return this and ``factor * (other - base)``, number by number."""

        def sums(name: str) -> Any:
            mine, theirs, subtracted = (getattr(use, name) for use in (self, other, base))
            if isinstance(mine, int):
                return max(0, round(mine + factor * (theirs - subtracted)))
            kinds = {kind: mine[kind] + factor * (theirs.get(kind, 0) - subtracted.get(kind, 0)) for kind in mine}
            return {kind: max(0, round(size)) for kind, size in kinds.items()}

        same = "module", "line", "read", "layers"
        return replace(self, **{one.name: sums(one.name) for one in fields(self) if one.name not in same})


@dataclass
class Outcome:
    """The outcome of a dry run.

    Attributes:
        text: the layout as it was given.
        layout: the layout.
        uses: what each rank that ran used, by rank.
        calls: calls and bytes on one rank, by axis and operation: of the rank that has the most bytes.
        failure: what failed, with ranks and lines; empty if nothing did.
        warnings: where ranks that were assumed to do the same do not.
        seconds: what it took.
    """

    text: str
    layout: ParallelLayout
    uses: dict[int, Use] = field(default_factory=dict)
    calls: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    failure: str = ""
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def stages(self) -> dict[int, int]:
        """For every stage, the rank that needs the most memory of those that ran."""
        worst: dict[int, int] = {}
        for rank, use in self.uses.items():
            stage = self.layout.coordinates(rank)["pp"]
            if stage not in worst or use.peak > self.uses[worst[stage]].peak:
                worst[stage] = rank
        return dict(sorted(worst.items()))

    @property
    def peak(self) -> int:
        """Bytes on the rank that needs the most."""
        return max((use.peak for use in self.uses.values()), default=0)

    def fits(self, gpu: int) -> bool:
        """Whether nothing failed, and the peak and CUDA's context fit the memory of a GPU."""
        return not self.failure and self.peak + CONTEXT <= gpu

    def require_peak(self, limit: int) -> None:
        """Raise unless no rank needs more than a number of bytes.

        Raises:
            DoesNotFit: a rank needs more, or the step failed.
        """
        if self.failure or self.peak > limit:
            raise DoesNotFit("\n".join(self.lines()), peak=self.peak, limit=limit)

    def lines(self, gpu: int | None = None) -> list[str]:
        """Return the report; with whether it fits a GPU of this many bytes."""
        lines = [f"layout {self.text or 'without axes'}: {self.layout.world_size} ranks, of which {len(self.uses)} ran"]
        if self.failure:
            return [*lines, "FAILED", *(f"  {line}" for line in self.failure.splitlines())]
        lines += [f"layers: {_LAYERS[use.layers]}" for use in list(self.uses.values())[:1]]
        unit, name = (GIB, "GiB") if self.peak >= GIB else (GIB >> 10, "MiB")
        head = f"{name} on the rank of each stage that needs the most, by kind at the peak; idle: before the step"
        lines += ["", head, *self._memory_table(unit), ""]
        if gpu is not None:
            margin = (gpu - self.peak - CONTEXT) / GIB
            what = f"fits {gpu / GIB:.1f} GiB with a margin of {margin:.1f} GiB"
            if margin < 0:
                what = f"DOES NOT FIT {gpu / GIB:.1f} GiB: {-margin:.1f} GiB too much"
            lines += [f"{what}; CUDA's context of {CONTEXT / GIB} GiB is counted, NCCL's buffers are not", ""]
        lines += [f"stage {stage}: {self._place(self.uses[rank])}" for stage, rank in self.stages.items()]
        lines += ["", "communication of one step, on the rank with the most bytes:"]
        lines += [f"{'axis':12}{'operation':24}{'calls':>8}{'MiB':>12}"]
        for (axis, operation), (calls, nbytes) in sorted(self.calls.items(), key=lambda item: -item[1][1]):
            lines.append(f"{axis:12}{operation:24}{calls:>8}{nbytes / 2**20:>12.1f}")
        lines += self._read_lines()
        return [*lines, *(f"WARNING: {text}" for text in self.warnings)]

    def _memory_table(self, unit: int) -> list[str]:
        rows: list[tuple[str, ...]] = [("stage", "rank", *KINDS, "peak", "idle", "TFLOP")]
        for stage, rank in self.stages.items():
            use = self.uses[rank]
            sizes = [*(use.by_kind.get(kind, 0) for kind in KINDS), use.peak, sum(use.idle.values())]
            rows.append((str(stage), str(rank), *(f"{size / unit:.2f}" for size in sizes), f"{use.flops / 1e12:.1f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]

    @staticmethod
    def _place(use: Use) -> str:
        where = f"in {use.module or 'no module'} at {use.line or 'the start of the step'}"
        return f"{use.weights:,} weights; peak {where}"

    def _read_lines(self) -> list[str]:
        read: dict[tuple[str, str], int] = {}
        for use in self.uses.values():
            read |= {place: max(count, read.get(place, 0)) for place, count in use.read.items()}
        if not read:
            return []
        head = "values that the program reads and a dry run does not know (it gets 1, 1.0 or False), and how often:"
        return ["", head, *(f"  {line}: {what} ({count})" for (line, what), count in sorted(read.items()))]

    def as_json(self, gpu: int | None = None) -> dict[str, Any]:
        """Return the outcome as JSON has it: sizes in bytes."""
        return {
            "layout": self.text,
            "ranks": self.layout.world_size,
            "failure": self.failure,
            "warnings": self.warnings,
            "peak": self.peak,
            "gpu": gpu,
            "fits": None if gpu is None else self.fits(gpu),
            "stages": [
                {"stage": stage, "rank": rank, **_jsonable(self.uses[rank])} for stage, rank in self.stages.items()
            ],
            "communication": [
                {"axis": axis, "operation": operation, "calls": calls, "bytes": nbytes}
                for (axis, operation), (calls, nbytes) in self.calls.items()
            ],
            "seconds": round(self.seconds, 2),
        }


def _jsonable(use: Use) -> Mapping[str, Any]:
    read = [{"line": line, "what": what, "times": count} for (line, what), count in use.read.items()]
    return asdict(use) | {"read": read}
