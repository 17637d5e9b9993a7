"""The comparison of one rank's training with that of one process."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch

from parallel_state.simulated.agreement import digest_of
from parallel_state.verify.layouts import ONE_PROCESS, Variant
from parallel_state.verify.marks import wrong_marks
from parallel_state.verify.outcome import Difference
from parallel_state.verify.program import Program, VerifyError
from parallel_state.verify.seeds import InitialPart
from parallel_state.verify.training import LEARNING_RATE, training_of
from parallel_state.verify.weights import ModelTensors, NamedTensor, assemble

_DEPTH = 16  # how many roundings of one size a value of a small model has gone through
_SMALL = 1e-3  # of the largest gradient: the error of a smaller one is measured against this


@dataclass
class ReferenceStep:
    """What one process computed in a step, by name; ``updated`` has what the update reports, the norm first."""

    gradients: ModelTensors
    weights: ModelTensors
    losses: dict[str, float]
    updated: dict[str, float]
    scores: ModelTensors = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """The gradient norm."""
        return next(iter(self.updated.values()), 0.0)

    @property
    def floor(self) -> float:
        """The gradient against which the errors of small gradients are measured."""
        largest = (float(gradient.abs().max()) for gradient in self.gradients.values() if gradient.numel())
        return _SMALL * max(largest, default=0.0)


@dataclass
class OneProcess:
    """The training of one process.

    Attributes:
        dtype: the type of the weights.
        start: weights and buffers before the first step.
        steps: the steps.
        hidden_size: of the model.
        elements: the number of elements of the weights.
        trained: the names of the parameters that require a gradient.
    """

    dtype: torch.dtype
    start: ModelTensors
    steps: list[ReferenceStep]
    hidden_size: int
    elements: int
    trained: list[str]

    @property
    def fingerprint(self) -> str:
        """A sum over the bits of all values: it changes if the numbers of one process change."""
        digest = hashlib.sha256()
        for step in self.steps:
            for values in (step.gradients, step.weights):
                for name in sorted(values):
                    digest.update(name.encode() + digest_of(values[name]).encode())
            digest.update(repr((sorted(step.losses.items()), step.updated)).encode())
        return digest.hexdigest()[:16]


@dataclass
class RankReport:
    """What comparing one rank found.

    Attributes:
        rank: the rank.
        coordinates: its index on every axis of more than one rank.
        differences: those of the first step that has one.
        largest: the largest relative difference of all values.
        digests: part of a tensor -> a sum of the bits that it has after the last step.
        initial: part of a weight -> what the program initialized it with.
    """

    rank: int
    coordinates: dict[str, int]
    differences: list[Difference] = field(default_factory=list)
    largest: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)
    initial: dict[str, InitialPart] = field(default_factory=dict)


def tolerance(program: Program, reference: OneProcess) -> float:
    """Return the largest relative difference that rounding explains.

    Sums in another order differ by about ``eps * sqrt(terms)``; the longest sums, of gradients, have as many terms as a
    step has tokens, and products of the width of the model in each. The factor covers the depth of a small model.
    """
    tokens = program.seq_length * program.micro_batches * program.micro_batch_size
    return _DEPTH * torch.finfo(reference.dtype).eps * math.sqrt(tokens * reference.hidden_size)


def error_between(mine: torch.Tensor, true: torch.Tensor, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest finite true value, or to ``floor`` if that is larger.

    Values that are equally infinite, or both NaN, are equal.
    """
    if not mine.numel():
        return 0.0
    mine, true = mine.double(), true.double()
    differs = (mine != true) & ~(mine.isnan() & true.isnan())
    off = float(torch.where(differs, mine - true, 0.0).abs().max())
    scale = max(float(true.nan_to_num(0.0, 0.0, 0.0).abs().max()), floor)
    if not math.isfinite(off):
        return math.inf
    return off / scale if scale else (math.inf if off else 0.0)


def rank_and_coordinates(variant: Variant) -> tuple[int, dict[str, int]]:
    """Return the running rank, and its index on every axis of more than one rank."""
    rank = torch.distributed.get_rank()
    coordinates = variant.layout.coordinates(rank)
    shown = [axis for axis in variant.layout.dense_axes if variant.layout.sizes[axis] > 1]
    shown += [axis for axis in ("ep", "etp") if variant.layout.ep > 1 and variant.layout.sizes[axis] > 1]
    return rank, {axis: coordinates[axis] for axis in shown}


def train_reference(program: Program, dtype: torch.dtype, steps: int) -> OneProcess:
    """Train in one process, which this simulated rank is."""
    training = training_of(program, ONE_PROCESS, dtype, None)
    start = assemble(training.named, [parameter.tensor for parameter in training.named])
    trained = [parameter.name for parameter in training.named if parameter.tensor.requires_grad]
    reference = OneProcess(dtype, start, [], training.config.hidden_size, _elements(training.named), trained)
    for step in range(steps):
        values = training.forward_backward(step)
        parameters = [
            parameter for parameter, value in zip(training.named, values.gradients, strict=True) if value is not None
        ]
        flat = [value[0].clone() for value in values.gradients if value is not None]
        gradients = [value.reshape(parameter.tensor.shape) for parameter, value in zip(parameters, flat, strict=True)]
        whole = assemble(parameters, gradients)
        scores = {name: value for name, (value, _) in values.scores.items()}
        updated = training.update(step)
        weights = assemble(training.named, [parameter.tensor for parameter in training.named])
        reference.steps.append(ReferenceStep(whole, weights, values.losses, updated, scores))
    return reference


def check_deterministic(first: OneProcess, second: OneProcess) -> None:
    """Raise if two runs of one process differ.

    Raises:
        VerifyError: with the first value that differs.
    """
    pairs = [("the initial weight", first.start, second.start)]
    for number, (one, other) in enumerate(zip(first.steps, second.steps, strict=True), start=1):
        pairs += [(f"the gradient of step {number} of", one.gradients, other.gradients)]
    for what, values, others in pairs:
        for name, value in values.items():
            if name not in others or not torch.equal(value.nan_to_num(), others[name].nan_to_num()):
                raise VerifyError(
                    f"the program is not deterministic in one process: two runs have another value of {what} {name}; "
                    "draw random numbers from a generator with a fixed seed, such as the index of the batch",
                    name=name,
                )


def check_trained(reference: OneProcess) -> None:
    """Raise if one process trains nothing, with which every layout would agree, or computes values that are not finite.

    Raises:
        VerifyError: all gradients are 0, or the first value that is not finite.
    """
    for number, step in enumerate(reference.steps, start=1):
        losses = {name: torch.tensor(value) for name, value in step.losses.items()}
        for kind, values in (("loss", losses), ("gradient of", step.gradients)):
            for name, value in values.items():
                if not bool(value.isfinite().all()):
                    raise VerifyError(
                        f"the {kind} {name} of step {number} is not finite in one process, so that layouts cannot be "
                        "compared; choose other batches (a mean over no tokens is 0 / 0), or repair the program",
                        name=name,
                        step=number,
                    )
    gradients = [gradient for step in reference.steps for gradient in step.gradients.values()]
    if gradients and not any(bool(gradient.any()) for gradient in gradients):
        raise VerifyError(
            "all gradients are 0 in one process, so that every layout would be equal: the loss is detached from the "
            "model, or no token of the batches counts"
        )


def compare_rank(
    program: Program, variant: Variant, reference: OneProcess, dtype: torch.dtype, allowed: float
) -> RankReport:
    """Train this rank, and compare each step with that of one process until one differs.

    Args:
        program: the program.
        variant: the layout.
        reference: the training of one process.
        dtype: the type of the weights.
        allowed: the largest relative difference that counts as equal.
    """
    training = training_of(program, variant, dtype, reference.start)
    _check_divided(variant, _elements(training.named), reference.elements)
    report = RankReport(*rank_and_coordinates(variant), initial=training.initial)
    for name, note in wrong_marks(training.named, variant):
        report.differences.append(Difference("mark", name, 1, report.rank, report.coordinates, math.inf, note))
    moved = [part.name for part in training.initial.values() if part.digest != part.expected]
    for name in moved if program.seeded else ():
        note = "its initial values are not those of one process"
        report.differences.append(Difference("seed", name, 1, report.rank, report.coordinates, math.inf, note))
    before = reference.start
    for step, true in enumerate(reference.steps):
        compared = _Compared(report, step + 1, allowed, program.scale)
        values = training.forward_backward(step)
        for name, value in values.losses.items():
            compared.numbers("loss", name, value, true.losses.get(name, math.nan))
        for parameter, gradient in zip(training.named, values.gradients, strict=True):
            if (gradient is not None) != (parameter.name in reference.trained):
                compared.trained(parameter.name, gradient is not None)
            elif gradient is not None:
                mine, elements = gradient
                expected = parameter.of(true.gradients).reshape(-1)
                compared.tensors("gradient", parameter.name, mine, expected[elements], true.floor)
        for name, (score, rows) in values.scores.items():
            compared.tensors("scores", name, score, true.scores[name][rows], 0.0)
        compared.updates(training.update(step), true.updated)
        for parameter in training.named:
            compared.update(parameter, before, true)
        before = true.weights
    report.digests = {parameter.position: digest_of(parameter.tensor) for parameter in training.named}
    return report


def _check_divided(variant: Variant, elements: int, whole: int) -> None:
    layout = variant.layout
    divided = [f"{axis}={layout.sizes[axis]}" for axis in ("tp", "pp", "ep") if layout.sizes[axis] > 1]
    if divided and elements >= whole:
        raise VerifyError(
            f"the model provider ignores the layout {variant.text!r}: a rank has {elements} elements of the {whole} of "
            f"the weights, with {', '.join(divided)}; build the model from the config, pre_process and post_process "
            "that the function gets",
            layout=variant.text,
        )


class _Compared:
    """Adds the differences of a step to the report of a rank, unless an earlier step has some."""

    def __init__(self, report: RankReport, step: int, tolerance: float, scale: float = 0.0) -> None:
        self._report, self._step, self._tolerance, self._scale = report, step, tolerance, scale
        self._counts = all(difference.step == step for difference in report.differences)

    def tensors(self, kind: str, name: str, mine: torch.Tensor, true: torch.Tensor, floor: float) -> None:
        """Compare two tensors."""
        self._add(kind, name, error_between(mine, true, floor))

    def numbers(self, kind: str, name: str, mine: float, true: float) -> None:
        """Compare two numbers."""
        ours, theirs = (torch.tensor([number], dtype=torch.float64) for number in (mine, true))
        error = error_between(ours, theirs, self._scale)
        note = f"{mine:.8g} instead of {true:.8g}"
        self._add(kind, name, error, note, self._tolerance / _DEPTH)  # one sum, without the depth of the model

    def trained(self, name: str, is_trained: bool) -> None:
        """Add a parameter that requires a gradient either here or in one process."""
        note = (
            "it requires a gradient here, and not in one process"
            if is_trained
            else ("it requires no gradient here, and one in one process")
        )
        self._add("gradient", name, math.inf, note)

    def updates(self, mine: dict[str, float], true: dict[str, float]) -> None:
        """Compare what an update reports: the gradient norm first."""
        for index, name in enumerate(dict.fromkeys([*true, *mine])):
            kind = "loss" if index else "gradient norm"
            self.numbers(kind, name, mine.get(name, math.nan), true.get(name, math.nan))

    def update(self, named: NamedTensor, before: ModelTensors, true: ReferenceStep) -> None:
        """Compare what a step added to a weight or a buffer, to the rounding of the sum."""
        start, end = named.of(before), named.of(true.weights)
        is_weight = isinstance(named.tensor, torch.nn.Parameter)
        floor = LEARNING_RATE * true.floor / max(true.norm, 1.0) if is_weight else 0.0
        if start.is_floating_point() and is_weight and end.numel():
            floor = max(floor, float(end.abs().max()) * 4 * torch.finfo(end.dtype).eps / self._tolerance)
        kind = "weight" if is_weight else "buffer"
        error = error_between(_added(named.tensor.detach(), start), _added(end, start), floor)
        self._add(kind, named.name, error)

    def _add(self, kind: str, name: str, error: float, note: str = "", allowed: float | None = None) -> None:
        report = self._report
        if not self._counts:
            return
        report.largest = max(report.largest, error)
        if error > (allowed or self._tolerance):
            report.differences.append(Difference(kind, name, self._step, report.rank, report.coordinates, error, note))


def _added(value: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return what was added to a tensor of any dtype, as float64: 0 to an infinite element that stays."""
    if value.is_complex():
        value, start = torch.view_as_real(value), torch.view_as_real(start)
    return torch.where(value == start, 0.0, value.double() - start.double())


def replicas_that_differ(reports: list[RankReport], steps: int) -> list[Difference]:
    """Return the parts of tensors that do not have the same bits on all ranks that have them."""
    first: dict[str, RankReport] = {}
    differences = []
    for report in reports:
        for position, digest in report.digests.items():
            other = first.setdefault(position, report)
            if other.digests[position] != digest:
                note = f"other bits than on rank {other.rank}"
                differences.append(
                    Difference("replicas", position, steps, report.rank, report.coordinates, math.inf, note)
                )
    return differences


def _elements(named: list[NamedTensor]) -> int:
    return sum({id(parameter.tensor): parameter.tensor.numel() for parameter in named}.values())
