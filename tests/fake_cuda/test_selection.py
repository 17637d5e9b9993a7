"""The lists of tests that do not run on the pretended device name tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.not_on_a_gpu import ALWAYS, NOT_ON_A_GPU, SIMULATED, reason_to_fail, runs_only_with_all

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", [*NOT_ON_A_GPU, *SIMULATED, *ALWAYS])
def test_an_entry_names_a_test(entry: str) -> None:
    file, _, test = entry.partition("::")
    assert f"\ndef {test}" in (ROOT / file).read_text()


def test_the_list_is_short() -> None:
    assert len(NOT_ON_A_GPU) <= 5


def test_cases_are_chosen_by_their_names() -> None:
    matrix = "tests/workers/test_parity_matrix.py::test_layout_computes_what_one_process_computes"
    assert runs_only_with_all(f"{matrix}[TP2, float32]")
    assert not runs_only_with_all(f"{matrix}[TP2 x PP2 x CP2, bfloat16]")
    assert not runs_only_with_all("tests/workers/test_parity.py::test_gradients_equal_those_of_one_process")
    assert reason_to_fail("tests/workers/train/test_gradient_fusion.py::test_fusion_is_the_default_on_a_cpu")
    assert reason_to_fail(f"{matrix}[TP2, float32]") is None
