"""The tests selected for the fake CUDA device, and the tests that cannot run on it, exist."""

from __future__ import annotations

from pathlib import Path

from tests.fake_cuda.selection import (
    CHOSEN,
    NOT_ON_A_GPU,
    SIMULATED,
    cases_that_do_not_exist,
    is_chosen,
    reason_to_fail,
)

ROOT = Path(__file__).parents[2]
ENTRIES = [*NOT_ON_A_GPU, *SIMULATED, *(entry for entries in CHOSEN.values() for entry in entries)]


def test_every_entry_names_a_test() -> None:
    for entry in ENTRIES:
        file, _, test = entry.partition("[")[0].partition("::")
        assert f"\ndef {test}" in (ROOT / file).read_text(), entry
    for path in Path(__file__).parent.glob("test_*.py"):
        assert is_chosen(f"tests/fake_cuda/{path.name}::test"), path


def test_cases_are_chosen_by_their_names() -> None:
    matrix = "tests/workers/test_parity_matrix.py::test_layout_computes_what_one_process_computes"
    assert not is_chosen(f"{matrix}[TP2, float32]")
    assert is_chosen(f"{matrix}[CP2, learned positions, packed, float32]")
    assert is_chosen("tests/workers/weights/test_offload.py::test_views_see_the_memory_come_back")
    assert not is_chosen("tests/workers/test_parity.py::test_rank_without_rows_to_train_on_takes_part")
    assert reason_to_fail("tests/workers/train/test_gradient_fusion.py::test_fusion_is_the_default_on_a_cpu")
    assert reason_to_fail(f"{matrix}[TP2, float32]") is None


def test_a_case_that_has_another_name_is_found() -> None:
    colocated = "tests/workers/test_colocated.py::test_training_with_offload_equals_training_without_to_the_bit"
    assert cases_that_do_not_exist([f"{colocated}[float32]"]) == [
        "tests/workers/test_colocated.py::test_training_with_offload[bfloat16, distributed optimizer]"
    ]
    assert cases_that_do_not_exist([]) == []
