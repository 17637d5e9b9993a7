"""Weights and step of a checkpoint of Megatron-LM are loaded from and into any layout, whatever its padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from mcontroller.errors import DataError
from tests.ranks import run_ranks
from tests.workers.full_state import full_state_dict
from tests.workers.roles import VOCAB, actor, critic, experience, largest_difference, own_shard, weights
from workers.model.local_spec import block_spec
from workers.model.transformer_config import transformer_config

pytestmark = pytest.mark.simulated

STEP, PADDED_VOCAB = 40, 96


def save_as_megatron_does(parallel: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    """Save a model with a vocabulary padded to 96 and an optimizer; return its weights without the padding."""
    worker = actor(parallel, "actor")
    worker.update_actor(own_shard(experience(8), worker))
    first, last = (worker.context.pg.pp.rank() == stage for stage in (0, worker.parallel.pp - 1))
    directory = Path(path) / f"iter_{STEP:07d}"
    directory.mkdir(exist_ok=True)
    with worker.context.activate():
        config = transformer_config(worker.config.model, worker.parallel)
        model = GPTModel(
            config,
            block_spec(config, "local", worker.context.pg.pp.rank(), None),
            PADDED_VOCAB,
            max_sequence_length=32,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            pg_collection=worker.context.pg,
        )
        trained = unwrap_model(worker.model[0]).sharded_state_dict()
        state = {
            "model": model.sharded_state_dict(),
            "optimizer": worker.state.optimizer.sharded_state_dict(trained),
            "iteration": STEP,
            "checkpoint_version": 3.0,
        }
        dist_checkpointing.save(state, str(directory))
        full = full_state_dict([model], worker.context)
    (Path(path) / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    return {name: weight[:VOCAB] if len(weight) == PADDED_VOCAB else weight for name, weight in full.items()}


def load(parallel: dict[str, Any], path: str) -> dict[str, Any]:
    worker = actor(parallel, "actor_ref")
    step = worker.load_checkpoint(path)
    policy = worker.compute_log_prob(own_shard(experience(8), worker))
    reference = worker.compute_ref_log_prob(own_shard(experience(8), worker))
    same = policy is None or torch.equal(policy.batch["old_log_probs"], reference.batch["ref_log_prob"])
    worker.update_actor(own_shard(experience(8), worker))
    return {"step": step, "same": same, "updates": worker.state.counters["updates"]}


def loaded_weights(parallel: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    worker = actor(parallel, "rollout")
    worker.load_checkpoint(f"{path}/iter_{STEP:07d}")
    return weights(worker)


def load_into_critic(
    parallel: dict[str, Any], path: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return the weights before, the weights after, and the updates that work after it."""
    worker = critic(parallel)
    before = weights(worker)
    worker.load_checkpoint(path)
    after = weights(worker)
    worker.compute_values(own_shard(experience(8), worker))
    return before, after, worker.state.counters["updates"]


def check_critic(path: str, saved: dict[str, torch.Tensor]) -> None:
    """Check that a critic has all weights of a checkpoint of logits, and its own head."""
    for before, after, updates in run_ranks(load_into_critic, 2, {"pp": 2}, path):
        assert torch.equal(before.pop("output_layer.weight"), after.pop("output_layer.weight")) and updates == 0
        body = {name: weight for name, weight in saved.items() if name != "output_layer.weight"}
        assert largest_difference(body, after) == 0


def rejected(path: str) -> tuple[DataError, bool]:
    """Load a checkpoint of another model; return the error and whether the worker is as it was."""
    worker = actor({}, "actor", model={"num_layers": 1})
    worker.update_actor(own_shard(experience(8), worker))
    before, optimizer, counters = weights(worker), worker.state.optimizer, dict(worker.state.counters)
    with pytest.raises(DataError) as caught:
        worker.load_checkpoint(path)
    same = worker.state.optimizer is optimizer and worker.state.counters == counters
    return caught.value, same and largest_difference(before, weights(worker)) == 0


def save_as_actor(path: str) -> dict[str, torch.Tensor]:
    worker = actor({"tp": 2}, "actor")
    worker.update_actor(own_shard(experience(8), worker))
    worker.save_checkpoint(path, global_step=2)
    worker.save_checkpoint(path, global_step=3, max_to_keep=2)
    worker.save_checkpoint(path, global_step=4, max_to_keep=2)
    return weights(worker)


def read_as_megatron_lm_does(path: str) -> dict[str, Any]:
    """Read the newest checkpoint with Megatron-Core alone, from the file and the directory that Megatron-LM uses."""
    worker = actor({"pp": 2}, "actor", model={"seed": 99})
    step = int((Path(path) / "latest_checkpointed_iteration.txt").read_text())
    directory = Path(path) / f"iter_{step:07d}"
    model = unwrap_model(worker.model[0])
    with worker.context.activate():
        common = dist_checkpointing.load_common_state_dict(str(directory))
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(directory))
    model.load_state_dict(loaded["model"])
    return {"step": step, "iteration": common["iteration"], "weights": weights(worker)}


def test_megatron_lm_finds_and_reads_our_checkpoints(tmp_path: Path) -> None:
    path = str(tmp_path)
    saved = run_ranks(save_as_actor, 2, path)[0]
    links = {link.name: str(link.readlink()) for link in tmp_path.iterdir() if link.is_symlink()}
    assert links == {"iter_0000003": "global_step_3", "iter_0000004": "global_step_4"}
    for rank in run_ranks(read_as_megatron_lm_does, 2, path):
        assert rank["step"] == rank["iteration"] == 4
        assert largest_difference(saved, rank["weights"]) == 0
    check_critic(path, saved)
    for error, unchanged in run_ranks(rejected, 1, path):
        assert error.differing and unchanged


def test_weights_of_a_checkpoint_of_megatron_lm_load_in_any_layout(tmp_path: Path) -> None:
    path = str(tmp_path)
    saved = run_ranks(save_as_megatron_does, 4, {"tp": 2, "pp": 2}, path)[0]
    assert largest_difference(saved, run_ranks(loaded_weights, 2, {"tp": 2}, path)[0]) == 0
    for rank in run_ranks(load, 2, {"pp": 2}, path):
        assert rank == {"step": STEP, "same": True, "updates": 1}
    check_critic(path, saved)
