"""Rows are written at once; a wrong value fails its row, which makes the exit status 1."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from workers.gpucheck.parity import CaseRun, case_rows
from workers.gpucheck.rows import FAILED, Report, Row, at_most, skipped
from workers.gpucheck.size import freed_row

FLOAT32, BFLOAT16 = CaseRun("dense"), CaseRun("dense", "bfloat16")
SCORES, TOKENS = -torch.linspace(1, 6, 16 * 16).view(16, 16), torch.arange(16 * 16).view(16, 16)
RIGHT: dict[str, Any] = {
    "scores": SCORES,
    "greedy": TOKENS,
    "sampled": torch.cat((TOKENS, TOKENS + 1)),
    "drift": 1e-6,
    "metrics": [{"grad_norm": 2.0}, {"grad_norm": 1.5}],
    "weights": {"weight": torch.ones(4, 4)},
    "after": SCORES + 0.1,
}
FREED = {"freed_gb": 30.0, "allocator_gb": 30.0, "driver_gb": 29.9}


def changed(tensor: torch.Tensor, by: float) -> torch.Tensor:
    result = tensor.clone()
    result.view(-1)[5] += by
    return result


def case_with(run: CaseRun, **changes: Any) -> Callable[[], Iterable[Row]]:
    return lambda: case_rows(run, RIGHT | changes, RIGHT)


def freed(**changes: float) -> Callable[[], Iterable[Row]]:
    return lambda: [freed_row(1, **FREED | changes)]


KINDS: dict[str, tuple[Callable[[], Iterable[Row]], Callable[[], Iterable[Row]]]] = {
    "scores": (case_with(FLOAT32, scores=changed(SCORES, 1e-5)), case_with(FLOAT32, scores=changed(SCORES, 1e-3))),
    "scores NaN": (case_with(FLOAT32), case_with(FLOAT32, scores=changed(SCORES, float("nan")))),
    "scores bfloat16": (case_with(BFLOAT16, scores=changed(SCORES, 0.1)), case_with(BFLOAT16, scores=SCORES + 0.1)),
    "scores of other rows": (case_with(BFLOAT16), case_with(BFLOAT16, scores=SCORES[:6])),
    "greedy": (case_with(FLOAT32, greedy=changed(TOKENS, 1)), case_with(FLOAT32, greedy=TOKENS + 1)),
    "sampled": (case_with(FLOAT32), case_with(FLOAT32, sampled=RIGHT["sampled"].flip(0))),
    "drift": (case_with(BFLOAT16, drift=0.005), case_with(BFLOAT16, drift=0.1)),
    "metrics": (case_with(FLOAT32), case_with(FLOAT32, metrics=[{"grad_norm": 2.1}, {"grad_norm": 1.5}])),
    "metrics NaN": (case_with(BFLOAT16), case_with(BFLOAT16, metrics=[{"grad_norm": float("nan")}] * 2)),
    "weights": (case_with(FLOAT32), case_with(FLOAT32, weights={"weight": torch.ones(4, 4) + 0.01})),
    "weights without a common name": (case_with(FLOAT32), case_with(FLOAT32, weights={"other": torch.ones(4, 4)})),
    "after": (case_with(FLOAT32), case_with(FLOAT32, after=changed(RIGHT["after"], 0.1))),
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
