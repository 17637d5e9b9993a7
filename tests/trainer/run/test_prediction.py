"""The prediction of a step: published rows that no number was fitted to are in order, and other hardware is read."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from mcontroller.errors import ConfigError
from workers.prediction.step_time import TABLE, hardware_of

ROOT = Path(__file__).parents[3]


def test_rows_that_nothing_was_fitted_to_are_in_order_as_in_the_docs() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "prediction.py"))
    hardware, rows = hardware_of("h100"), benchmark["pre_training"]()
    page = (ROOT / "docs" / "prediction.md").read_text()
    assert benchmark["table_of"]("Steps of pre-training", rows, hardware) in page
    assert benchmark["correlation_of"](rows[1::2], hardware) > 0.8
    assert benchmark["correlation_of"](benchmark["reinforcement"]()[1::2], hardware) > 0.7


def test_hardware_is_a_name_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TABLE.read_text().partition("[h200]")[0].replace("flops = 989e12", "flops = 312e12"))
    assert (hardware_of("h100").flops, hardware_of(str(path)).flops) == (989e12, 312e12)
    with pytest.raises(ConfigError, match="hardware is 'b300'; expected h100, h200, or a TOML file"):
        hardware_of("b300")
    path.write_text("[mine]\nflops = 1.0\n")
    with pytest.raises(ConfigError, match="wrong or missing keys bandwidth, bandwidth_across"):
        hardware_of(str(path))
