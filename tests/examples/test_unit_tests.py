"""What becomes of unit tests of Megatron-LM on simulated ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.verify.unit_tests import outcome_of

SUM = """
import torch

def test():
    torch.distributed.init_process_group("gloo")
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    assert ones == 2
"""


ENDS_IN_A_BARRIER = """
import os
import torch

def test():
    torch.distributed.init_process_group("gloo")
    try:
        torch.distributed.all_reduce(torch.ones(1 + int(os.environ["RANK"])))
    finally:
        torch.distributed.barrier()
"""


PATCHES = """
import os
import pathlib
import torch
from unittest import mock

def test():
    torch.distributed.init_process_group("gloo")
    with mock.patch.object(pathlib, "own", os.environ["RANK"], create=True):
        torch.distributed.barrier()
        assert pathlib.own == os.environ["RANK"]
        torch.distributed.barrier()
"""


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (SUM, "passed"),
        ("import os\ndef test():\n    assert os.environ['RANK'] == '0'\n", "failed"),
        (ENDS_IN_A_BARRIER, "failed"),
        (PATCHES, "patches shared attributes"),
        ("import pytest\ndef test():\n    pytest.skip('not here')\n", "skipped"),
        ("def test():\n    raise NameError('TENorm is not defined')\n", "needs Transformer Engine"),
        ("import no_such_package\n", "needs a package"),
    ],
)
def test_an_outcome_says_what_a_test_needs(
    source: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    path = tmp_path / f"{tmp_path.name}.py"  # another module for each test
    path.write_text(source)
    of_ranks, error, rank = outcome_of(str(path), 2, packages=())
    assert of_ranks == outcome
    if source == ENDS_IN_A_BARRIER:  # not that the barrier was stopped
        assert error.startswith("CollectiveMismatch") and rank is None
    elif outcome == "failed":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.setenv(name, "")  # and so restored after the test
        assert rank == "1"
        assert outcome_of(str(path), 2, packages=(), alone=rank)[1] == error
