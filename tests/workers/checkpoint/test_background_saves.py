"""A checkpoint written in the background has the state at its start, and is complete after waiting for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import actor, critic, experience, largest_difference, own_shard, weights

ROWS = 8


def directories(path: str) -> list[str]:
    return sorted(entry.name for entry in Path(path).iterdir() if not entry.name.startswith("."))


def save_and_go_on(parallel: dict[str, Any], path: str) -> dict[str, Any]:
    worker = actor(parallel, "actor", ppo_epochs=1)
    batch = own_shard(experience(ROWS), worker)
    for _ in range(2):
        worker.update_actor(batch)
    worker.save_checkpoint(path, global_step=1, asynchronous=True)
    saved, at_once = weights(worker), directories(path)
    worker.update_actor(batch)
    worker.save_checkpoint(path, global_step=2, max_to_keep=1, asynchronous=True)
    before_the_second = directories(path)
    worker.wait_for_checkpoint()
    listings = [at_once, before_the_second, directories(path)]
    return {"saved": saved, "later": weights(worker), "seen": listings}


def loaded(parallel: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    worker = actor(parallel, "actor", model={"seed": 99})
    worker.load_checkpoint(path)
    return weights(worker)


@pytest.mark.simulated
def test_next_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    path = str(tmp_path)
    ranks = run_ranks(save_and_go_on, 4, {"tp": 2, "pp": 2}, path)
    assert ranks[0]["seen"][0] == []
    assert ranks[0]["seen"][1] == ["global_step_1", "iter_0000001", "latest", "latest_checkpointed_iteration.txt"]
    assert ranks[0]["seen"][2] == ["global_step_2", "iter_0000002", "latest", "latest_checkpointed_iteration.txt"]
    assert largest_difference(ranks[0]["saved"], ranks[0]["later"]) > 1e-4
    assert largest_difference(ranks[0]["later"], run_ranks(loaded, 1, {}, path)[0]) == 0


def changed_while_saving(path: str) -> dict[str, Any]:
    """Change the weights while the checkpoint is being written."""
    worker = critic({})
    saved = weights(worker)
    worker.save_checkpoint(path, asynchronous=True)
    with torch.no_grad():
        for parameter in worker.model[0].parameters():
            parameter.zero_()
    worker.load_checkpoint(path)
    return {"saved": saved, "loaded": weights(worker)}


@pytest.mark.simulated
def test_checkpoint_has_the_weights_at_the_start_of_the_save(tmp_path: Path) -> None:
    result = run_ranks(changed_while_saving, 1, str(tmp_path))[0]
    assert largest_difference(result["saved"], result["loaded"]) == 0
