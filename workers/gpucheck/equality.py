"""Checks whose reference is the CPU: arithmetic, devices and dtypes, scores, tokens, updates, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from workers.gpucheck.course import Case, Outcome, can_save, continue_course
from workers.gpucheck.machine import machine_rows
from workers.gpucheck.policy import ROWS, Policy, ppo_columns
from workers.gpucheck.rows import Result, Row, at_most, compared
from workers.gpucheck.session import CHECKS, Session
from workers.gpucheck.tolerances import TOLERANCES, largest_difference, score_difference
from workers.weights.offload import gradient_tensors, optimizer_tensors

__all__ = [
    "placement_row",
    "score_row",
    "token_rows",
    "update_rows",
]


_HELP = "run one case with --only {} and compare with docs/gpu.md, 'When a row fails'"


# ---- this machine ----------------------------------------------------------------------------------------------------


@CHECKS.register("machine")
def machine(session: Session) -> Iterator[Row]:
    """Yield the devices and packages."""
    yield from machine_rows(session.device.type, session.transformer_engine)


@CHECKS.register("arithmetic")
def arithmetic(session: Session) -> Iterator[Row]:
    """Compare a matrix product on every device, in every dtype, with float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 512, 512, generator=generator).unbind()
    devices = (
        [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if session.on_gpu else [session.device]
    )
    # Relative to the size of the result, 22.6: the rounding of each dtype, and of the output in it.
    for name, dtype, limit in (
        ("float32", torch.float32, 2e-5),
        ("bfloat16", torch.bfloat16, 4e-2),
        ("float16", torch.float16, 1e-2),
    ):
        expected = left.to(dtype).double() @ right.to(dtype).double()
        for device in devices:
            product = (left.to(device, dtype) @ right.to(device, dtype)).cpu()
            error = largest_difference(product, expected) / float(expected.std())
            help_text = "the GPU or its driver computes wrong products: run a memory test, and check TF32 overrides"
            yield at_most(f"arithmetic: {device} {name}", error, limit, reference="float64 on the CPU", note=help_text)


# ---- devices and dtypes ----------------------------------------------------------------------------------------------


@CHECKS.register("placement")
def placement(session: Session) -> Iterator[Row]:
    """Check devices and dtypes of every parameter, buffer, gradient buffer and optimizer state, after an update."""

    def row(case: Case) -> Iterator[Row]:
        with case.policy() as policy:
            policy.update(ppo_columns())
            dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[case.dtype]
            yield placement_row(f"placement: {case}", tensors_of(policy), session.device, dtype)

    yield from session.per_case("placement", row)


def tensors_of(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all tensors of a policy that is trained: ``parameter NAME``, ``buffer NAME``, and so on."""
    for name, parameter in policy.parameters():
        yield f"parameter {name}", parameter
    for chunk in policy.worker.model:
        for name, buffer in chunk.named_buffers():
            yield f"buffer {name}", buffer
        for name, module in chunk.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                    yield f"attribute {name}.{key}", value
    for index, gradient in enumerate(gradient_tensors(policy.worker.model)):
        yield f"gradients {index}", gradient
    assert policy.worker.optimizer is not None
    for index, state in enumerate(optimizer_tensors(policy.worker.optimizer)):
        yield f"optimizer {index}", state


def placement_row(name: str, tensors: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype) -> Row:
    """Return a row that is ok if every tensor is on the device, and every parameter has the dtype.

    Steps that an optimizer counts, which have no dims, may be on the host. Its other state is float32.

    Args:
        name: of the row.
        tensors: see ``tensors_of``.
        device: of all tensors.
        dtype: of parameters.
    """
    wrong, count = [], 0
    for label, tensor in tensors:
        kind, count = label.partition(" ")[0], count + 1
        if tensor.device.type != device.type and not (kind == "optimizer" and tensor.dim() == 0):
            wrong.append(f"{label} is on {tensor.device}")
        expected = {"parameter": dtype, "optimizer": torch.float32}.get(kind)
        if expected is not None and tensor.is_floating_point() and tensor.dtype != expected:
            wrong.append(f"{label} is {tensor.dtype}")
    note = f"{'; '.join(wrong[:3])}: build chunks with workers.build_model, or call workers.place_chunks on them"
    label = str(dtype).removeprefix("torch.")
    return compared(
        name, not wrong, f"{count - len(wrong)} of {count} tensors", f"all on {device.type}, {label}", note=note
    )


# ---- results ---------------------------------------------------------------------------------------------------------


@CHECKS.register("scores")
def scores(session: Session) -> Iterator[Row]:
    """Compare log-probabilities with the initial weights."""
    yield from session.per_case(
        "scores",
        lambda case: [score_row(f"scores: {case}", case, session.outcome(case).scores, session.reference(case).scores)],
    )


def score_row(name: str, case: Case, value: Tensor, reference: Tensor) -> Row:
    """Return the row of log-probabilities, ``[rows, response]``."""
    tolerance = TOLERANCES[case.precision]
    return at_most(
        name,
        score_difference(value, reference, tolerance),
        tolerance.scores,
        reference="the CPU's",
        note=_HELP.format("scores"),
    )


@CHECKS.register("tokens")
def tokens(session: Session) -> Iterator[Row]:
    """Compare generated tokens, and generation's log-probabilities with those of scoring."""
    yield from session.per_case("tokens", lambda case: token_rows(case, session.outcome(case), session.reference(case)))


def token_rows(case: Case, value: Outcome, reference: Outcome) -> Iterator[Row]:
    """Yield the rows of greedy and sampled tokens, and of generation against scoring on the same device."""
    tolerance = TOLERANCES[case.precision]
    if tolerance.rows < ROWS:
        for kind in ("greedy", "sampled"):
            ours, theirs = getattr(value, kind), getattr(reference, kind)
            equal = int((ours == theirs).all(1).sum()) if ours.shape == theirs.shape else 0
            allowed = tolerance.rows * len(theirs) // ROWS
            passed = equal >= len(theirs) - allowed
            text = f"{equal} of {len(theirs)} rows equal"
            yield compared(
                f"tokens: {case} {kind}", passed, text, "the CPU's", f"{allowed} rows", note=_HELP.format("tokens")
            )
    yield at_most(
        f"tokens: {case} drift",
        value.drift,
        tolerance.scores,
        reference="scoring, same device",
        note="generation and scoring disagree on this device: the cache or the attention of generation is wrong",
    )


@CHECKS.register("updates")
def updates(session: Session) -> Iterator[Row]:
    """Compare weights, metrics and scores after the updates."""
    yield from session.per_case(
        "updates", lambda case: update_rows(case, session.outcome(case), session.reference(case))
    )


def update_rows(case: Case, value: Outcome, reference: Outcome) -> Iterator[Row]:
    """Yield the rows of metrics, of weights after the updates, and of the scores with them.

    Weights are compared where both have a parameter of a name: fused layers of Transformer Engine name norms otherwise.
    """
    tolerance = TOLERANCES[case.precision]
    yield at_most(
        f"updates: {case} metrics",
        _metric_difference(value.metrics, reference.metrics),
        tolerance.metrics,
        reference="the CPU's",
        note=_HELP.format("updates"),
    )
    shared = value.weights.keys() & reference.weights.keys()
    if tolerance.weights is not None:
        yield at_most(
            f"updates: {case} weights",
            _largest(largest_difference(value.weights[name], reference.weights[name]) for name in shared),
            tolerance.weights,
            reference=f"{len(shared)} of {len(reference.weights)} tensors",
            note=_HELP.format("updates"),
        )
    yield at_most(
        f"updates: {case} scores after",
        score_difference(value.after, reference.after, tolerance),
        tolerance.after,
        reference="the CPU's",
        note=_HELP.format("updates"),
    )


def _metric_difference(value: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]) -> float:
    """The largest difference of a metric, relative to the reference if that is more than 1.

    The largest ratio of one token is left out: its score is compared with the others.
    """
    return _largest(
        abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name]))
        for ours, theirs in zip(value, reference, strict=True)
        for name in theirs
        if name != "ratio_max"
    )


def _largest(values: Iterable[float]) -> float:
    """The largest of the values; NaN if one is NaN, or if there is none."""
    listed = list(values)
    return float(torch.tensor(listed, dtype=torch.float64).max()) if listed else float("nan")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@CHECKS.register("checkpoints")
def checkpoints(session: Session) -> Iterator[Row]:
    """Continue from checkpoints: of this device on itself, of the CPU on this device, of this device on the CPU."""
    if not can_save():
        yield Row(
            "checkpoints", "", result=Result.SKIPPED, note="psutil, which Megatron-Core saves with, is not installed"
        )
        return
    chosen = [case for case in session.cases if case.model == "dense" and case.variant is None]
    chosen += [case for case in session.cases if case.variant == "distributed optimizer"]
    own = {case: session.outcome(case) for case in chosen}
    local = [case for case in chosen if case == case.reference]
    on_cpu = session.cpu_process("device", "continue", local)
    for case in chosen:
        again = TOLERANCES[case.precision].again
        resumed = continue_course(case, session.checkpoint("device", case))
        yield _continued(case, "resumed", resumed, own[case].after, again, "without a restart")
        if case.variant is None:
            moved = continue_course(case, session.checkpoint("cpu", case.reference))
            after = TOLERANCES[case.precision].after
            yield _continued(case, "from the CPU", moved, session.reference(case).after, after, "the CPU's")
    results = on_cpu.results()
    for case in local:
        after = TOLERANCES[case.precision].after
        yield _continued(case, "to the CPU", results[case], session.reference(case).after, after, "the CPU's")


def _continued(case: Case, how: str, value: Tensor, reference: Tensor, limit: float, what: str) -> Row:
    difference = score_difference(value, reference, TOLERANCES[case.precision])
    help_text = "the continued run differs: run --only placement --only updates, which this depends on"
    return at_most(f"checkpoints: {case} {how}", difference, limit, reference=what, note=help_text)
