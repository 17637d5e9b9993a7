"""Where a layout begins to differ: the first module forward, else the first backward, and what its value is instead.

Both trainings run again, with hooks on all modules in the step that differs. A simulation has the same bits each time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from parallel_state.simulated import CommunicationTrace, Transfer, run_ranks
from parallel_state.simulated.trace import LinesOfOperations
from parallel_state.verify.comparing import OneProcess, error_between, rank_and_coordinates, tolerance
from parallel_state.verify.layouts import ONE_PROCESS, Variant
from parallel_state.verify.marks import missing_mark
from parallel_state.verify.outcome import Difference, DifferingModule, Outcome
from parallel_state.verify.program import Program
from parallel_state.verify.recording import ModuleCall, StepRecords, record_step
from parallel_state.verify.training import training_of

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of a training, counted from 1."""

    program: Program
    variant: Variant
    reference: OneProcess
    number: int


@dataclasses.dataclass
class _Recorded:
    """A rank's step: ``first`` is the index in the step of its first micro-batch, and ``count`` their number."""

    rank: int
    coordinates: dict[str, int]
    first: int
    count: int
    records: StepRecords
    positions: list[torch.Tensor]  # of its micro-batches, if the program says which tokens a rank has
    gradients: dict[str, _Pair] = dataclasses.field(default_factory=dict)  # finalized, and of one process, by name
    missing_marks: dict[str, str] = dataclasses.field(default_factory=dict)  # by name, if the sum over tp is missing
    ended: int = 0  # the number of calls in the trace of the ranks when the gradients were finalized


def record_reference(program: Program, reference: OneProcess, step: int) -> StepRecords:
    """Return what the modules of one process compute in a step, counted from 1."""
    return _record_ranks(_Step(program, ONE_PROCESS, reference, step), CommunicationTrace())[0].records


def locate(program: Program, variant: Variant, reference: OneProcess, true: StepRecords, outcome: Outcome) -> None:
    """Add to an outcome where the differences of its step begin, and what gradients are instead.

    Args:
        program: the program.
        variant: the layout.
        reference: the training of one process.
        true: what its modules compute in the step.
        outcome: has the differences of the step; none if an error ended the training in its first step.
    """
    differences = outcome.differences
    step = _Step(program, variant, reference, differences[0].step if differences else 1)
    trace = CommunicationTrace(values=True)
    ranks = _record_ranks(step, trace, fails=not differences)
    if len(ranks) < variant.layout.world_size:
        return
    search = _Search(step, true, ranks, list(trace))
    outcome.place = search.first("forward") or search.first("backward")
    gradients = [difference for difference in differences if difference.kind == "gradient"]
    if gradients and outcome.place is None:
        outcome.finalized_by = search.finalized_by(gradients[0].rank)
    outcome.differences = [search.noted(difference) for difference in differences]


def _record_ranks(step: _Step, trace: CommunicationTrace, fails: bool = False) -> list[_Recorded]:
    """Train all ranks up to a step, and record it; up to an error if the training ends with one."""
    ranks: list[_Recorded] = []
    try:
        run_ranks(step.variant.layout, lambda: _record_rank(step, trace, ranks), trace=trace)
    except Exception:
        if not fails:
            raise
    return sorted(ranks, key=lambda rank: rank.rank)


def _record_rank(step: _Step, trace: CommunicationTrace, ranks: list[_Recorded]) -> None:
    """Train this rank up to a step, and record it: add it to the ranks before the step."""
    program, variant, reference, index = step.program, step.variant, step.reference, step.number - 1
    training = training_of(program.recorded(), variant, reference.dtype, reference.start)
    for earlier in range(index):
        training.forward_backward(earlier)
        training.update(earlier)
    indices = training.micro_batches(index)
    first, count = indices[0] - program.micro_batches * index, len(indices) // variant.merged
    positions = [] if program.positions is None else [program.positions(index) for index in indices]
    recorded = _Recorded(*rank_and_coordinates(variant), first, count, record_step(training.models, trace), positions)
    ranks.append(recorded)
    with LinesOfOperations():
        values = training.forward_backward(index)
    recorded.ended = len(trace)
    true = reference.steps[index].gradients
    recorded.gradients = {
        parameter.name: (gradient[0].clone(), parameter.of(true).reshape(-1)[gradient[1]])
        for parameter, gradient in zip(training.named, values.gradients, strict=True)
        if gradient is not None and parameter.name in reference.trained
    }
    recorded.missing_marks = {parameter.name: missing_mark(parameter, variant) for parameter in training.named}


class _Search:
    """Compares the records of all ranks with those of one process."""

    def __init__(self, step: _Step, true: StepRecords, ranks: list[_Recorded], trace: list[Transfer]) -> None:
        self._variant, self._step, self._true, self._ranks, self._trace = step.variant, step.number, true, ranks, trace
        self._length = step.program.seq_length
        self._tolerance = 4 * tolerance(step.program, step.reference)
        self._scale = functools.cache(self._measured_scale)

    def first(self, direction: str) -> DifferingModule | None:
        """Return the first module that differs in the order of the pass, on the lowest rank."""
        calls = list(self._true.outputs)
        for name in dict.fromkeys(name for name, *_ in (calls if direction == "forward" else reversed(calls))):
            for rank in self._ranks:
                place = self._place(direction, name, rank)
                if place is not None:
                    return place
        return None

    def _place(self, direction: str, name: str, rank: _Recorded) -> DifferingModule | None:
        for call, mine, candidates in self._pairs(direction, name, rank):
            error, closest = min(
                ((error_between(mine, candidate), candidate) for candidate in candidates), key=lambda pair: pair[0]
            )
            if error > self._tolerance:
                note = _multiple(mine, closest, self._tolerance) or self._sum(direction, call, rank, closest)
                source = self._true.sources[name]
                index = call[1] * self._variant.merged + rank.first
                at = self._step, rank.rank, rank.coordinates
                calls = self._calls(direction, call, rank, candidates)
                by = self._computed_by(call, rank) if direction == "backward" else ()
                return DifferingModule(direction, name, source, index, *at, error, note, calls, by)
        return None

    def _calls(
        self, direction: str, call: ModuleCall, rank: _Recorded, true: Sequence[torch.Tensor]
    ) -> tuple[str, ...]:
        """Return the collectives that a rank made in a module; backward, since the last gradient that is right.

        ``true`` has the values of one process that the module may have: what a collective got and returned is named if
        it is one of them, or a multiple.
        """
        records = rank.records
        if direction == "forward":
            start, end = records.ended[call]
        else:
            end = records.computed[call]
            right = [at for other, at in records.computed.items() if at <= end and self._is_right(other, rank)]
            start = max(right, default=records.ended[call][1])  # what the loss communicates
        return self._made(rank, start, end, true)

    def _made(self, rank: _Recorded, start: int, end: int, true: Sequence[torch.Tensor]) -> tuple[str, ...]:
        made = [
            transfer for transfer in self._trace[start:end] if transfer.rank == rank.rank and len(transfer.members) > 1
        ]
        return tuple(
            dict.fromkeys(
                f"{transfer.operation} over {transfer.axis or transfer.group} at {transfer.through or transfer.line}"
                f"{self._values(transfer, true)}"
                for transfer in made
            )
        )

    def finalized_by(self, rank: int) -> tuple[str, ...]:
        """Return the collectives of a rank after the last gradient of an activation."""
        recorded = self._ranks[rank]
        return self._made(recorded, max(recorded.records.computed.values(), default=0), recorded.ended, ())

    def _computed_by(self, call: ModuleCall, rank: _Recorded) -> tuple[str, ...]:
        sources, consumers = rank.records.sources, rank.records.consumers.get(call, [])
        return tuple(f"{name} ({sources[name]}): {', '.join(operations)}" for name, operations in consumers)

    def _values(self, transfer: Transfer, true: Sequence[torch.Tensor]) -> str:
        """Return what a collective got and returned, compared with values of one process."""
        lines = []
        for name, tensors in (("its input", transfer.inputs), ("its result", transfer.outputs)):
            for tensor in tensors:
                same = [
                    expected for expected in true if expected.numel() == tensor.numel() and tensor.is_floating_point()
                ]
                texts = [self._compared(tensor.reshape(expected.shape), expected) for expected in same]
                lines += [f"{name} {text}" for text in list(filter(None, texts))[:1]]
        return f" ({', '.join(lines)})" if lines else ""

    def _compared(self, mine: torch.Tensor, true: torch.Tensor) -> str:
        if error_between(mine, true) <= self._tolerance:
            return "is that of one process"
        return _multiple(mine, true, self._tolerance)

    def _is_right(self, call: ModuleCall, rank: _Recorded) -> bool:
        for other, mine, candidates in self._pairs("backward", call[0], rank):
            if other == call:
                return min(error_between(mine, candidate) for candidate in candidates) <= self._tolerance
        return False

    def _pairs(
        self, direction: str, name: str, rank: _Recorded
    ) -> Iterator[tuple[ModuleCall, torch.Tensor, list[torch.Tensor]]]:
        """Yield the calls of a module with this rank's value and the parts of the true one that it may have."""
        if self._is_partial(name):
            return
        mine_by_call, true = (
            (rank.records.outputs, self._true.outputs)
            if direction == "forward"
            else (rank.records.gradients, self._true.gradients)
        )
        for call, mine in mine_by_call.items():
            is_trained = call[1] < rank.count  # later passes compute scores, of other rows
            wholes = self._wholes(true, call, rank.first) if call[0] == name and is_trained else []
            scale = self._scale(rank.rank, call[1]) if wholes and direction == "backward" else 1.0
            parts = [part for whole in wholes for part in self._parts(whole, rank, call[1])]
            candidates = [part * scale for part in parts if part.shape == mine.shape]
            if candidates:
                yield call, mine, candidates

    def _wholes(self, true: dict[ModuleCall, torch.Tensor], call: ModuleCall, first: int) -> list[torch.Tensor]:
        """Return the value of one process for a micro-batch; for merged ones, joined along the dims that have rows."""
        name, index, number = call
        merged = self._variant.merged
        outputs = [true.get((name, first + index * merged + offset, number)) for offset in range(merged)]
        values = [value for value in outputs if value is not None]
        if merged == 1 or len(values) < merged or values[0].dim() < 2:
            return values if merged == 1 else []
        return [torch.cat(values), torch.cat(values, 1), torch.stack(values, 1).flatten(0, 1)]

    def _is_partial(self, name: str) -> bool:
        """Whether a module has other rows, or other layers, on every rank."""
        layout = self._variant.layout
        return (".experts" in name and (layout.ep > 1 or layout.tp > 1 or self._variant.merged > 1)) or (
            layout.pp > 1 and name in self._true.containers
        )

    def _measured_scale(self, number: int, index: int) -> float:
        """Return the factor between the gradients of a rank's micro-batch and those of one process.

        A loss that is averaged over micro-batches is divided by the number of those of a rank, and the gradients are
        averaged over the ranks later. The factor is measured at the output of the model.
        """
        rank = self._ranks[number]
        for other in self._ranks:
            same = all(other.coordinates.get(axis) == rank.coordinates.get(axis) for axis in ("dp", "cp"))
            model = next((name for name in other.records.containers if "." not in name and name[0].isupper()), None)
            mine = other.records.gradients.get((model or "", index, 0)) if same else None
            wholes = self._wholes(self._true.gradients, (model or "", index, 0), rank.first)
            if mine is not None and wholes:
                candidates = [part for whole in wholes for part in self._parts(whole, other, index)]
                parts = [part for part in candidates if part.shape == mine.shape]
                if parts:
                    fit = min(parts, key=lambda part: error_between(mine, part * _factor(mine, part)))
                    return self._expected(_factor(mine, fit))
        return 1.0

    def _expected(self, factor: float) -> float:
        """Return the factor that averages over micro-batches explain and that is nearest to the measured one."""
        layout = self._variant.layout
        known = [float(dp * cp * merged) for dp in {1, layout.dp} for cp in {1, layout.cp}
                 for merged in {1, self._variant.merged}]  # fmt: skip
        return min(known, key=lambda value: abs(value - factor))

    def _parts(self, whole: torch.Tensor, rank: _Recorded, index: int) -> list[torch.Tensor]:
        """Return the tensor and its parts on a rank: of the sequence, as cp and sp divide it, and of the last dim."""
        layout, at = self._variant.layout, rank.coordinates
        parts = [whole]
        if whole.dim() > 1 and self._variant.sequence_parallel:
            parts.append(whole.transpose(0, 1))  # the embedding returns [seq, batch] already
        if layout.cp > 1:
            for part in list(parts):
                for dim in [dim for dim, size in enumerate(part.shape) if size == self._length]:
                    if rank.positions and self._variant.merged == 1:
                        parts.append(part.index_select(dim, rank.positions[index]))
                        continue
                    pieces = part.chunk(2 * layout.cp, dim)
                    parts.append(torch.cat([pieces[at["cp"]], pieces[2 * layout.cp - 1 - at["cp"]]], dim))
        if layout.tp > 1:
            for part in list(parts):
                dims = [dim for dim, size in enumerate(part.shape) if size % layout.tp == 0]
                parts += [part.chunk(layout.tp, dim)[at["tp"]] for dim in dims]
                if part.dim() and part.shape[-1] % (2 * layout.tp) == 0:  # of a gated linear layer: gate and up
                    halves = [half.chunk(layout.tp, -1)[at["tp"]] for half in part.chunk(2, -1)]
                    parts.append(torch.cat(halves, -1))
        return parts

    def _sum(self, direction: str, call: ModuleCall, rank: _Recorded, true: torch.Tensor) -> str:
        def value(other: _Recorded) -> torch.Tensor | None:
            records = other.records
            return (records.outputs if direction == "forward" else records.gradients).get(call)

        axes = ("tp", "ep") if direction == "forward" else ("tp", "cp", "ep")
        return self._missing_sum(axes, rank.rank, true, [value(record) for record in self._ranks])

    def noted(self, difference: Difference) -> Difference:
        """Return a difference; of a finalized gradient, with what it is instead of that of one process, if known."""
        rank, name = difference.rank, difference.name
        if difference.kind != "gradient" or name not in self._ranks[rank].gradients:
            return difference
        mine, true = self._ranks[rank].gradients[name]
        values = [record.gradients.get(name, (None, None))[0] for record in self._ranks]
        note = "" if mine.numel() == 1 else _multiple(mine, true, self._tolerance)  # one number is a multiple of any
        note = note or self._missing_sum(("tp", "cp", "dp", "ep", "pp"), rank, true, values)
        over_tp = note.endswith("over tp is missing")
        note += self._ranks[rank].missing_marks[name] if over_tp else ""
        return dataclasses.replace(difference, note=note) if note else difference

    def _missing_sum(
        self, axes: Sequence[str], rank: int, true: torch.Tensor, values: Sequence[torch.Tensor | None]
    ) -> str:
        """Return a note if the sum over an axis is the true value."""
        layout = self._variant.layout
        for axis in (candidate for candidate in axes if layout.sizes[candidate] > 1):
            members = next(group for group in layout.groups(axis) if rank in group)
            parts = [values[member] for member in members]
            if any(part is None or part.shape != true.shape for part in parts):
                continue
            mine = values[rank]
            if all(part is None or mine is None or torch.equal(part, mine) for part in parts):
                continue  # reduced already
            total = torch.stack([part for part in parts if part is not None]).sum(0)
            factor = _factor(total, true)
            if factor and error_between(total, true * factor) <= self._tolerance:
                times = "" if abs(factor - 1) <= self._tolerance else f" {factor:.6g} times"
                return f"the sum over {axis} is{times} that of one process: a reduction over {axis} is missing"
        return ""


def _factor(mine: torch.Tensor, true: torch.Tensor) -> float:
    """Return the number by which ``true`` is nearest to ``mine``."""
    squares = float((true.double() ** 2).sum())
    return float((mine.double() * true.double()).sum()) / squares if squares else 0.0


def _multiple(mine: torch.Tensor, true: torch.Tensor, tolerance: float) -> str:
    factor = _factor(mine, true)
    if not float(mine.abs().max()):
        return "is 0"
    close = factor and error_between(mine, true * factor) <= tolerance * max(abs(factor), 1.0)
    return f"is {factor:.6g} times that of one process" if close and abs(factor - 1) > tolerance else ""
