"""The names that trackers are passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcontroller.errors import ConfigError
from trainer.run.config import read_run_config
from trainer.run.training import run_of_trackers

CONFIG = Path(__file__).parents[3] / "examples/ppo/config.yaml"


def names(directory: Path, *overrides: str) -> tuple[str, str]:
    run = run_of_trackers(read_run_config(CONFIG, ["trackers=[wandb, jsonl]", *overrides]), directory)
    return run.project, run.name


def test_trackers_get_the_names_of_project_and_experiment(tmp_path: Path) -> None:
    assert names(tmp_path / "first") == ("mcontroller", "first")
    assert names(tmp_path, "project_name=math", "experiment_name=grpo-7b") == ("math", "grpo-7b")


@pytest.mark.parametrize("override", ["project_name=math", "experiment_name=grpo"])
def test_names_that_no_tracker_shows_are_rejected(tmp_path: Path, override: str) -> None:
    for trackers in ("[]", "[jsonl, tensorboard]"):
        with pytest.raises(ConfigError) as caught:
            names(tmp_path, override, f"trackers={trackers}")
        assert override.startswith(str(caught.value.key))


def test_a_tracker_that_occurs_twice_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        names(tmp_path, "trackers=[jsonl, jsonl]")
    assert caught.value.key == "trackers"
