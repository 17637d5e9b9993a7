"""Rows are written at once; a wrong value fails its row, which makes the exit status 1."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from workers.gpucheck.computed import differences
from workers.gpucheck.equality import case_rows
from workers.gpucheck.rows import FAILED, Report, Row, at_most, skipped
from workers.gpucheck.size import freed_row

FLOAT32, BFLOAT16 = "float32", "bfloat16"
SCORES, TOKENS = -torch.linspace(1, 6, 16 * 16).view(16, 16), torch.arange(16 * 16).view(16, 16)
RIGHT: dict[str, Any] = {
    "scores": SCORES,
    "greedy": TOKENS,
    "sampled": torch.cat((TOKENS, TOKENS + 1)),
    "generation against scoring": 1e-6,
    "loss": torch.tensor([[0.5, 0.2]] * 3),
    "gradient norm": torch.tensor([[2.0, 1.5]] * 3),
    "weights": {"weight": torch.ones(4, 4)},
    "after": SCORES + 0.1,
}
PROCESS = {"dp": 0, **RIGHT, "values": SCORES}
DRIFT, NORM = "generation against scoring", "gradient norm"
FREED = {"freed_gb": 30.0, "allocator_gb": 30.0, "driver_gb": 29.9}


def changed(tensor: torch.Tensor, by: float) -> torch.Tensor:
    result = tensor.clone()
    result.view(-1)[5] += by
    return result


def case_with(precision: str, quantity: str = "scores", value: Any = SCORES) -> Callable[[], Iterable[Row]]:
    return lambda: case_rows("dense", precision, RIGHT | {quantity: value}, RIGHT)


def freed(**changes: float) -> Callable[[], Iterable[Row]]:
    return lambda: [freed_row(1, **FREED | changes)]


KINDS: dict[str, tuple[Callable[[], Iterable[Row]], Callable[[], Iterable[Row]]]] = {
    "scores": (
        case_with(FLOAT32, "scores", changed(SCORES, 1e-5)),
        case_with(FLOAT32, "scores", changed(SCORES, 1e-3)),
    ),
    "scores NaN": (case_with(FLOAT32), case_with(FLOAT32, "scores", changed(SCORES, float("nan")))),
    "scores bfloat16": (
        case_with(BFLOAT16, "scores", changed(SCORES, 0.1)),
        case_with(BFLOAT16, "scores", SCORES + 0.1),
    ),
    "scores of other rows": (case_with(BFLOAT16), case_with(BFLOAT16, "scores", SCORES[:6])),
    "greedy": (case_with(FLOAT32, "greedy", changed(TOKENS, 1)), case_with(FLOAT32, "greedy", TOKENS + 1)),
    "sampled": (case_with(FLOAT32), case_with(FLOAT32, "sampled", RIGHT["sampled"].flip(0))),
    "drift": (case_with(BFLOAT16, DRIFT, 0.005), case_with(BFLOAT16, DRIFT, 0.1)),
    "loss": (case_with(FLOAT32, "loss", RIGHT["loss"] + 1e-3), case_with(FLOAT32, "loss", RIGHT["loss"] + 0.01)),
    "norm": (case_with(FLOAT32, NORM, RIGHT[NORM] * 1.001), case_with(FLOAT32, NORM, RIGHT[NORM] * 1.01)),
    "norm NaN": (case_with(BFLOAT16), case_with(BFLOAT16, NORM, torch.full((3, 2), float("nan")))),
    "weights": (case_with(FLOAT32), case_with(FLOAT32, "weights", {"weight": torch.ones(4, 4) + 0.01})),
    "weights without a common name": (case_with(FLOAT32), case_with(FLOAT32, "weights", {"other": torch.ones(4, 4)})),
    "after": (case_with(FLOAT32), case_with(FLOAT32, "after", changed(RIGHT["after"], 0.1))),
    "freed in the allocator": (freed(allocator_gb=30.4), freed(allocator_gb=27.0)),
    "freed in the driver": (freed(driver_gb=29.0), freed(driver_gb=24.0)),
    "nothing freed": (freed(), freed(freed_gb=0.0, allocator_gb=0.0)),
}


@pytest.mark.parametrize(("right", "wrong"), KINDS.values(), ids=KINDS)
def test_a_wrong_value_fails_its_row_and_the_run(
    right: Callable[[], Iterable[Row]], wrong: Callable[[], Iterable[Row]]
) -> None:
    for rows, failed, status in ((right, 0, 0), (wrong, 1, 1)):
        report = Report(io.StringIO())
        report.add_all("a", "check", rows())
        assert sum(row.result == FAILED for row in report.rows) == failed and report.status == status
        assert all(row.reason for row in report.rows if row.result == FAILED)


def test_an_error_is_a_failed_row_after_those_before_it_and_others_follow() -> None:
    def check() -> Iterator[Row]:
        yield Row("first", {"seconds": 1.5})
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    written = io.StringIO()
    report = Report(written)
    report.add_all("b", "memory", check())
    report.add_all("b", "widths", [skipped("packed", "there is no reason"), at_most("padded", 1.25, 1.2, "repair it")])
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(line["part"], line["name"], line["result"]) for line in lines] == [
        ("b", "first", "passed"),
        ("b", "memory", "failed"),
        ("b", "packed", "skipped"),
        ("b", "padded", "failed"),
    ]
    assert lines[1]["reason"] == "RuntimeError: CUDA error: out of memory" and lines[0]["figures"] == {"seconds": 1.5}
    assert lines[3]["limit"] == "at most 1.2" and all(line["seconds"] >= 0 for line in lines)
    assert report.table().splitlines()[-1] == "4 rows: 1 passed, 2 failed, 1 skipped"
    assert [line.split() for line in report.table().splitlines()][-3:-1] == [
        ["b", "failed", "padded", "value", "1.25", "(at", "most", "1.2)"],
        ["repair", "it"],
    ]


def test_a_run_that_checked_nothing_fails() -> None:
    report = Report(io.StringIO())
    report.add_all("d", "groups", [skipped("groups", "ray cannot be imported")])
    assert report.status == 1


@pytest.mark.parametrize("quantity", ["scores", "loss", "weights"])
def test_nan_on_one_rank_is_a_difference_of_nan(quantity: str) -> None:
    wrong = (
        changed(PROCESS[quantity], float("nan")) if quantity != "weights" else {"weight": torch.full((4, 4), math.nan)}
    )
    by_quantity = differences(PROCESS, [PROCESS, PROCESS | {quantity: wrong}, PROCESS])
    assert {name for name, value in by_quantity.items() if math.isnan(value)} == {quantity}
