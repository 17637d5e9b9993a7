"""Rows are written at once; a wrong value fails its row, which makes the exit status 1."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.gpucheck.equality import LIMITS
from workers.gpucheck.rows import FAILED, PASSED, SKIPPED, Run
from workers.gpucheck.scale import TINY
from workers.parity.computed import differences

SCORES, TOKENS = -torch.linspace(1, 6, 16 * 16).view(16, 16), torch.arange(16 * 16).view(16, 16)
RIGHT: dict[str, Any] = {
    "dp": 0,
    "scores": SCORES,
    "values": SCORES,
    "greedy": TOKENS,
    "sampled": torch.cat((TOKENS, TOKENS + 1)),
    "generation": 1e-6,
    "loss": torch.tensor([[0.5, 0.2]] * 3),
    "gradient norm": torch.tensor([[2.0, 1.5]] * 3),
    "weights": {"weight": torch.ones(4, 4)},
    "after": SCORES + 0.1,
}
NORM = "gradient norm"


def started_run(output: io.StringIO) -> Run:
    return Run(output, TINY, Path(), sys.executable)


def changed(tensor: torch.Tensor, by: float) -> torch.Tensor:
    result = tensor.clone()
    result.view(-1)[5] += by
    return result


@pytest.mark.parametrize(
    ("precision", "quantity", "right", "wrong"),
    [
        ("float32", "scores", changed(SCORES, 1e-5), changed(SCORES, 1e-3)),
        ("float32", "scores", SCORES, changed(SCORES, math.nan)),
        ("bfloat16", "scores", changed(SCORES, 0.1), SCORES + 0.1),
        ("bfloat16", "scores", SCORES, SCORES[:6]),
        ("float32", "after", RIGHT["after"], changed(RIGHT["after"], 0.1)),
        ("float32", "greedy", changed(TOKENS, 1), TOKENS + 1),
        ("float32", "sampled", RIGHT["sampled"], RIGHT["sampled"].flip(0)),
        ("bfloat16", "generation", 0.005, 0.1),
        ("float32", "loss", RIGHT["loss"] + 1e-3, RIGHT["loss"] + 0.01),
        ("float32", NORM, RIGHT[NORM] * 1.001, RIGHT[NORM] * 1.01),
        ("bfloat16", NORM, RIGHT[NORM], torch.full((3, 2), math.nan)),
        ("float32", "weights", RIGHT["weights"], {"weight": torch.ones(4, 4) + 0.01}),
    ],
)
def test_a_wrong_value_fails_its_row_and_the_run(precision: str, quantity: str, right: Any, wrong: Any) -> None:
    for value, result in ((right, PASSED), (wrong, FAILED)):
        run = started_run(written := io.StringIO())
        with run.row("dense", LIMITS[precision]) as figures:
            figures |= differences([RIGHT], [RIGHT | {quantity: value}], LIMITS[precision])
        row = json.loads(written.getvalue())
        assert row["result"] == result and run.status == (result == FAILED)
    exceeded = {name for name, limit in row["limits"].items() if not row["figures"][name] <= limit}
    assert exceeded and all(quantity in name for name in exceeded)


def test_an_error_or_a_missing_figure_fails_its_row_and_others_follow() -> None:
    run = started_run(written := io.StringIO())
    run.part = "b"
    with run.row("first") as figures:
        figures["seconds"] = 1.5
    with run.row("memory"):
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")
    with run.row("padded", {"ratio": 1.2}) as figures:
        figures["seconds"] = 1.5
    run.write(SKIPPED, "packed", reason="there is no reason")
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(line["part"], line["name"], line["result"]) for line in lines] == [
        ("b", "first", PASSED),
        ("b", "memory", FAILED),
        ("b", "padded", FAILED),
        ("b", "packed", SKIPPED),
    ]
    assert lines[1]["figures"] == {"error": "RuntimeError: CUDA error: out of memory"}
    assert lines[2]["limits"] == {"ratio": 1.2} and all(line["seconds"] >= 0 for line in lines[:3])


def test_a_row_that_is_stopped_keeps_its_figures() -> None:
    run = started_run(written := io.StringIO())
    with pytest.raises(SystemExit), run.row("vllm") as figures:
        figures["start_s"] = 60.0
        raise SystemExit(1)
    row = json.loads(written.getvalue())
    assert row["result"] == FAILED and row["figures"] == {"start_s": 60.0}


def test_a_run_that_checked_nothing_fails() -> None:
    run = started_run(io.StringIO())
    run.write(SKIPPED, "groups", reason="ray cannot be imported")
    assert run.status == 1


@pytest.mark.parametrize("quantity", ["scores", "loss", "weights"])
def test_nan_on_one_rank_is_a_difference_of_nan(quantity: str) -> None:
    wrong = changed(RIGHT[quantity], math.nan) if quantity != "weights" else {"weight": torch.full((4, 4), math.nan)}
    by_quantity = differences([RIGHT], [RIGHT, RIGHT | {quantity: wrong}, RIGHT])
    assert {name for name, value in by_quantity.items() if math.isnan(value)} == {quantity}


def test_shards_are_compared_with_their_rows_of_other_shards() -> None:
    two = [RIGHT | {"dp": dp, "scores": rows} for dp, rows in enumerate(SCORES.chunk(2))]
    four = [RIGHT | {"dp": dp, "scores": rows} for dp, rows in enumerate(SCORES.chunk(4))]
    assert differences(two, four, ["scores"]) == {"scores": 0.0}
    four[3]["scores"] = four[3]["scores"] + 1
    assert differences(two, four, ["scores"])["scores"] == pytest.approx(1.0)
