"""Every kind of row is ok for the right value, and fails for a wrong one, which makes the exit status 1."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from workers.gpucheck.colocated.check import arrival_row, kept_row
from workers.gpucheck.course import Case, Outcome
from workers.gpucheck.equality import placement_row, score_row, token_rows, update_rows
from workers.gpucheck.memory import generation_row, offload_rows
from workers.gpucheck.rows import Result, Row, Table, status_of
from workers.gpucheck.several import bandwidth_rows, group_rows, layout_rows
from workers.gpucheck.speed import waits_row
from workers.gpucheck.verb import NAMES, SMALLEST
from workers.weights.not_arrived import WeightsNotArrived

MIB = 1 << 20
FLOAT32, BFLOAT16 = Case("dense"), Case("dense", "bfloat16")


def outcome(**changes: Any) -> Outcome:
    scores = -torch.linspace(1, 6, 12 * 16).view(12, 16)
    tokens = torch.arange(12 * 16).view(12, 16)
    right = Outcome(
        scores=scores,
        greedy=tokens,
        sampled=torch.cat((tokens, tokens + 1)),
        drift=1e-6,
        metrics=[{"grad_norm": 2.0}, {"grad_norm": 1.5}],
        weights={"0.weight": torch.ones(4, 4)},
        after=scores + 0.1,
    )
    return dataclasses.replace(right, **changes)


def perturbed(tensor: torch.Tensor, by: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[5] += by
    return changed


def layout_results(**changes: Any) -> list[dict[str, Any]]:
    right = outcome()
    halves = [
        {"shard": index, **{kind: getattr(right, kind).chunk(2)[index] for kind in ("scores", "after", "greedy")}}
        for index in (1, 0)
    ]
    return [{**halves[0], **changes}, halves[1], {"shard": None, "scores": None, "after": None, "greedy": None}]


def all_reduce(error: float) -> list[dict[str, float]]:
    return [{"error": each, "bytes": 4.0 * MIB, "seconds": 0.001} for each in (0.0, error)]


def placed(*tensors: tuple[str, torch.Tensor]) -> Row:
    return placement_row("placement", tensors, torch.device("cpu"), torch.bfloat16)


WEIGHT = ("parameter weight", torch.ones(2, dtype=torch.bfloat16))
MOMENT = ("optimizer 0", torch.ones(2))
RIGHT = outcome()
NOT_ALL = WeightsNotArrived.of_tensors(
    1, 2, tensors={"w": ([1], [2])}, old=[], missing=[], unknown=[], ranks=[0], target="group rollout"
)
GREEDY_OF_OTHERS = torch.cat((RIGHT.greedy[:9], RIGHT.greedy[9:] + 1))

KINDS: dict[str, tuple[Callable[[], Iterable[Row]], Callable[[], Iterable[Row]]]] = {
    "a score": (
        lambda: [score_row("scores", FLOAT32, perturbed(RIGHT.scores, 1e-5), RIGHT.scores)],
        lambda: [score_row("scores", FLOAT32, perturbed(RIGHT.scores, 1e-3), RIGHT.scores)],
    ),
    "a score that is NaN": (
        lambda: [score_row("scores", FLOAT32, RIGHT.scores, RIGHT.scores)],
        lambda: [score_row("scores", FLOAT32, perturbed(RIGHT.scores, float("nan")), RIGHT.scores)],
    ),
    "scores of a row in bfloat16": (
        lambda: [score_row("scores", BFLOAT16, perturbed(RIGHT.scores, 0.1), RIGHT.scores)],
        lambda: [score_row("scores", BFLOAT16, torch.cat((RIGHT.scores[:1] + 1, RIGHT.scores[1:])), RIGHT.scores)],
    ),
    "scores of another shape": (
        lambda: [score_row("scores", BFLOAT16, RIGHT.scores, RIGHT.scores)],
        lambda: [score_row("scores", BFLOAT16, RIGHT.scores[:6], RIGHT.scores)],
    ),
    "greedy tokens": (
        lambda: token_rows(FLOAT32, outcome(greedy=perturbed(RIGHT.greedy, 1)), RIGHT),
        lambda: token_rows(FLOAT32, outcome(greedy=GREEDY_OF_OTHERS), RIGHT),
    ),
    "sampled tokens": (
        lambda: token_rows(FLOAT32, RIGHT, RIGHT),
        lambda: token_rows(FLOAT32, outcome(sampled=RIGHT.sampled.flip(0)), RIGHT),
    ),
    "generation against scoring": (
        lambda: token_rows(BFLOAT16, outcome(drift=0.005), RIGHT),
        lambda: token_rows(BFLOAT16, outcome(drift=0.1), RIGHT),
    ),
    "metrics of an update": (
        lambda: update_rows(FLOAT32, RIGHT, RIGHT),
        lambda: update_rows(FLOAT32, outcome(metrics=[{"grad_norm": 2.1}, {"grad_norm": 1.5}]), RIGHT),
    ),
    "metrics that are NaN": (
        lambda: update_rows(BFLOAT16, RIGHT, RIGHT),
        lambda: update_rows(BFLOAT16, outcome(metrics=[{"grad_norm": 2.0}, {"grad_norm": float("nan")}]), RIGHT),
    ),
    "weights after updates": (
        lambda: update_rows(FLOAT32, outcome(weights={"0.weight": torch.ones(4, 4) + 1e-5}), RIGHT),
        lambda: update_rows(FLOAT32, outcome(weights={"0.weight": torch.ones(4, 4) + 0.01}), RIGHT),
    ),
    "weights without a common name": (
        lambda: update_rows(FLOAT32, RIGHT, RIGHT),
        lambda: update_rows(FLOAT32, outcome(weights={"other": torch.ones(4, 4)}), RIGHT),
    ),
    "scores after updates": (
        lambda: update_rows(FLOAT32, RIGHT, RIGHT),
        lambda: update_rows(FLOAT32, outcome(after=perturbed(RIGHT.after, 0.1)), RIGHT),
    ),
    "a parameter on another device": (
        lambda: [placed(WEIGHT, MOMENT)],
        lambda: [placed(WEIGHT, ("parameter router", torch.ones(2, dtype=torch.bfloat16, device="meta")))],
    ),
    "a buffer on another device": (
        lambda: [placed(("buffer bias", torch.ones(2)))],
        lambda: [placed(("buffer bias", torch.ones(2, device="meta")))],
    ),
    "a parameter in another dtype": (
        lambda: [placed(WEIGHT)],
        lambda: [placed(("parameter position", torch.ones(2)))],
    ),
    "optimizer state in another dtype": (
        lambda: [placed(WEIGHT, MOMENT)],
        lambda: [placed(WEIGHT, ("optimizer 0", torch.ones(2, dtype=torch.bfloat16)))],
    ),
    "bytes that the allocator keeps": (
        lambda: offload_rows(1000 * MIB, 1001 * MIB, 1000 * MIB),
        lambda: offload_rows(1000 * MIB, 900 * MIB, 1000 * MIB),
    ),
    "bytes that the driver does not get": (
        lambda: offload_rows(1000 * MIB, 1000 * MIB, 950 * MIB),
        lambda: offload_rows(1000 * MIB, 1000 * MIB, 800 * MIB),
    ),
    "an offload of nothing": (
        lambda: offload_rows(MIB, MIB, MIB),
        lambda: offload_rows(0, 0, 0),
    ),
    "host synchronisations": (
        lambda: [waits_row("synchronisations", Counter({"a.py:1": 8}), 2, 4.0)],
        lambda: [waits_row("synchronisations", Counter({"a.py:1": 8, "b.py:2": 1}), 2, 4.0)],
    ),
    "memory of generation": (
        lambda: [generation_row(300 * MIB, 200 * MIB, 50 * MIB)],
        lambda: [generation_row(8600 * MIB, 2000 * MIB, 500 * MIB)],
    ),
    "a sum over ranks": (lambda: bandwidth_rows(all_reduce(0.0)), lambda: bandwidth_rows(all_reduce(1.0))),
    "scores of a layout": (
        lambda: layout_rows("dp 2", layout_results(), RIGHT),
        lambda: layout_rows("dp 2", layout_results(scores=RIGHT.scores[:6]), RIGHT),
    ),
    "tokens of a layout": (
        lambda: layout_rows("dp 2", layout_results(), RIGHT),
        lambda: layout_rows("dp 2", layout_results(greedy=RIGHT.greedy[:6]), RIGHT),
    ),
    "weights that were sent": (
        lambda: [arrival_row("initial", "cuda_ipc", None, expected="cuda_ipc")],
        lambda: [arrival_row("initial", "cuda_ipc", NOT_ALL, expected="cuda_ipc")],
    ),
    "the transport of weights": (
        lambda: [arrival_row("initial", "cuda_ipc", None, expected="cuda_ipc")],
        lambda: [arrival_row("initial", "object_store", None, expected="cuda_ipc")],
    ),
    "memory of a transfer whose receiver died": (lambda: [kept_row(0)], lambda: [kept_row(128 << 10)]),
    "scores of a group on Ray": (
        lambda: group_rows({"scores": RIGHT.scores, "after": RIGHT.after, "greedy": RIGHT.greedy}, RIGHT),
        lambda: group_rows({"scores": RIGHT.after, "after": RIGHT.after, "greedy": RIGHT.greedy}, RIGHT),
    ),
}


@pytest.mark.parametrize(("right", "wrong"), KINDS.values(), ids=KINDS)
def test_a_wrong_value_fails_its_row_and_the_run(
    right: Callable[[], Iterable[Row]], wrong: Callable[[], Iterable[Row]]
) -> None:
    accepted, rejected = list(right()), list(wrong())
    assert Result.FAILED not in {row.result for row in accepted} and status_of(accepted) == 0
    failed = [row for row in rejected if row.result is Result.FAILED]
    assert len(failed) == 1 and failed[0].note, rejected
    assert status_of(rejected) == 1


def test_a_parameter_on_the_wrong_device_is_named() -> None:
    row = placed(WEIGHT, ("parameter 0.decoder.layers.0.mlp.router.weight", torch.ones(2, device="meta")))
    assert row.value == "0 of 2 tensors"  # it is on another device, and float32 as well
    assert row.note.startswith("parameter 0.decoder.layers.0.mlp.router.weight is on meta")


def test_a_run_that_checked_nothing_fails() -> None:
    skipped = Row("ray", "", result=Result.SKIPPED, note="ray cannot be imported")
    assert status_of([]) == status_of([skipped, Row("training", "100")]) == 1


def test_the_table_has_a_line_for_each_row_and_the_failed_ones_again() -> None:
    printed = io.StringIO()
    table = Table(printed)
    table.add(Row("scores: dense", "0.5", "the CPU's", "0.0002", Result.FAILED, "what to do"))
    table.add(Row("training", "100"))
    lines = printed.getvalue().splitlines()
    assert lines[0].split() == ["row", "value", "reference", "tolerance", "result"]
    assert lines[1].split() == ["scores:", "dense", "0.5", "the", "CPU's", "0.0002", "FAILED"]
    assert lines[2] == "    what to do"
    assert table.summary() == "2 rows: 0 ok, 1 FAILED, 1 info, 0 skipped\nfailed:\n  scores: dense"


def test_every_name_of_the_command_line_is_a_check() -> None:
    import workers.gpucheck.run  # noqa: F401  # registers them
    from workers.gpucheck.session import CHECKS

    assert tuple(CHECKS) and set(CHECKS) == set(NAMES) and set(SMALLEST) <= set(NAMES)
