"""Training continues from a checkpoint in any layout; an unsuitable checkpoint is rejected."""

from __future__ import annotations

import errno
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError, DataError
from tests import forking
from tests.ranks import run_ranks
from tests.workers.roles import (
    MODEL,
    SAMPLED,
    actor,
    critic,
    experience,
    largest_difference,
    own_shard,
    prompts,
    weights,
)
from workers.checkpoint.manifest import FORMAT, checkpoint_path, find_checkpoint, read_manifest
from workers.checkpoint.save import commit, create_partial
from workers.train.state import random_state, set_random_state

ROWS = 16
SAVED_IN = {"tp": 2, "pp": 2}  # over 8 ranks: dp 2


def save_and_go_on(
    parallel: dict[str, Any], path: str, optim: dict[str, Any], model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Save a checkpoint after one update, and return the weights before and after another."""
    worker = actor(parallel, "actor_rollout_ref", optim=optim, model=model or {}, ppo_epochs=1)
    batch = own_shard(experience(ROWS), worker)
    worker.sync_reference()
    worker.update_actor(batch)
    worker.generate_sequences(own_shard(prompts(ROWS, SAMPLED), worker))
    directory = worker.save_checkpoint(path, global_step=7)
    saved = weights(worker)
    worker.update_actor(batch)
    return {"directory": directory, "saved": saved, "later": weights(worker)}


def load_and_go_on(
    parallel: dict[str, Any], path: str, optim: dict[str, Any], model: dict[str, Any] | None = None
) -> dict[str, Any]:
    worker = actor(parallel, "actor_rollout_ref", optim=optim, model={"seed": 99} | (model or {}), ppo_epochs=1)
    step = worker.load_checkpoint(path)
    loaded = weights(worker)
    counters = dict(worker.state.counters)
    worker.update_actor(own_shard(experience(ROWS), worker))
    return {"step": step, "loaded": loaded, "counters": counters, "later": weights(worker)}


@pytest.fixture(scope="module")
def saved_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """Save once with the optimizer, and once with the distributed one."""

    @functools.cache
    def saved(distributed: bool) -> dict[str, Any]:
        path, optim = str(tmp_path_factory.mktemp("run")), {"distributed_optimizer": distributed}
        return run_ranks(save_and_go_on, 8, SAVED_IN, path, optim)[0] | {"path": path, "optim": optim}

    return saved


@pytest.fixture
def checkpoint(saved_with: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    return saved_with(True)


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("distributed", "world_size", "parallel"),
    [(True, 1, {}), (False, 4, {"pp": 4})],
    ids=["distributed-optimizer-one-process", "optimizer-pp4"],
)
def test_training_continues_in_any_layout(
    saved_with: Callable[[bool], dict[str, Any]], distributed: bool, world_size: int, parallel: dict[str, Any]
) -> None:
    checkpoint = saved_with(distributed)
    loaded = run_ranks(load_and_go_on, world_size, parallel, checkpoint["path"], checkpoint["optim"])[0]
    assert loaded["step"] == 7
    assert loaded["counters"] == {"phase": "ppo", "updates": 1, "optimizer_steps": 2, "sampled_batches": 1}
    assert largest_difference(checkpoint["saved"], loaded["loaded"]) == 0
    assert largest_difference(checkpoint["saved"], checkpoint["later"]) > 1e-3
    assert largest_difference(checkpoint["later"], loaded["later"]) < 1e-5


@pytest.mark.processes
def test_padded_bucket_does_not_shift_the_parameters_after_it(tmp_path: Path) -> None:
    """Tied weights are in a separate bucket, which 61 x 32 elements do not fill."""
    tied, optim = {"tie_embeddings": True}, {"distributed_optimizer": True}
    saved = forking.run_ranks(save_and_go_on, 2, {"pp": 2}, str(tmp_path), optim, tied)[0]
    for world_size, parallel in ((2, {"pp": 2}), (1, {})):
        loaded = forking.run_ranks(load_and_go_on, world_size, parallel, str(tmp_path), optim, tied)[0]
        assert largest_difference(saved["saved"], loaded["loaded"]) == 0
        assert largest_difference(saved["later"], loaded["later"]) < 1e-5


def scores_of_reference(parallel: dict[str, Any], path: str) -> torch.Tensor | None:
    worker = actor(parallel, "ref", model={"seed": 99})
    worker.load_checkpoint(path)
    scores = worker.compute_ref_log_prob(own_shard(experience(ROWS), worker))
    return None if scores is None else scores.batch["ref_log_prob"]


def scores_of_first_model(parallel: dict[str, Any]) -> torch.Tensor:
    return actor(parallel, "ref").compute_ref_log_prob(experience(ROWS)).batch["ref_log_prob"]


@pytest.mark.simulated
def test_reference_alone_is_loaded_from_the_reference_of_the_checkpoint(checkpoint: dict[str, Any]) -> None:
    expected = run_ranks(scores_of_first_model, 1, {})[0]
    actual = run_ranks(scores_of_reference, 2, {"pp": 2}, checkpoint["path"])[-1]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def names_of(*steps: int) -> list[str]:
    of_steps = [name for step in steps for name in (f"global_step_{step}", f"iter_{step:07d}")]
    return sorted([*of_steps, "latest", "latest_checkpointed_iteration.txt"])


def keep_two(path: str) -> None:
    worker = critic({})
    for step in (1, 2, 10):
        worker.save_checkpoint(path, global_step=step, max_to_keep=2)
    worker.save_checkpoint(path, global_step=10)


@pytest.mark.simulated
def test_remains_of_interrupted_saves_are_deleted_with_old_checkpoints(tmp_path: Path) -> None:
    for name in (".global_step_1.partial", ".global_step_3.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").touch()
    run_ranks(keep_two, 1, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names_of(10, 2)


EMPTY: Any = {
    "format": FORMAT,
    "layout": {},
    "parts": ["model"],
    "distributed_optimizer": False,
    "optimizer_buckets": None,
    "scheduler_steps": 0,
    "counters": {},
    "vocab_size": None,
    "files": {},
}


def test_interrupted_save_of_the_same_step_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = checkpoint_path(tmp_path, 5)

    def save(number: int) -> None:
        create_partial(target)
        commit(target, EMPTY | {"step": number}, keep=None)

    save(0)
    rename, stops = Path.rename, []

    def stopped(self: Path, to: Path) -> Path:
        if len(stops) == stop_at:
            raise KeyboardInterrupt
        stops.append(to)
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", stopped)
    for stop_at in (0, 1):
        stops.clear()
        with pytest.raises(KeyboardInterrupt):
            save(stop_at + 1)
        for path in (tmp_path, target):
            assert read_manifest(find_checkpoint(path))["step"] == 2 * stop_at
    monkeypatch.undo()
    save(3)
    assert read_manifest(find_checkpoint(tmp_path))["step"] == 3


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_that_was_moved_away_and_linked_is_replaced_or_forgotten(tmp_path: Path, step: int) -> None:
    """The link goes; what it leads to stays where it was moved to."""
    saved, moved = tmp_path / "saved", tmp_path / "moved"
    for number in (1, step):
        create_partial(checkpoint_path(saved, number))
        commit(checkpoint_path(saved, number), EMPTY | {"step": number}, keep=1)
        if not moved.exists():
            checkpoint_path(saved, 1).rename(moved)
            checkpoint_path(saved, 1).symlink_to(moved)
    assert read_manifest(find_checkpoint(saved))["step"] == step
    assert sorted(path.name for path in saved.glob("*_step_*")) == [f"global_step_{step}"]
    assert not checkpoint_path(saved, step).is_symlink() and (moved / "manifest.json").is_file()
    assert not list(saved.glob(".*"))


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EBUSY, "in use", str(path))

    for step in (1, 2):
        create_partial(checkpoint_path(tmp_path, step))
        monkeypatch.setattr(shutil, "rmtree", busy)
        commit(checkpoint_path(tmp_path, step), EMPTY | {"step": step}, keep=1)
        monkeypatch.undo()
    assert read_manifest(find_checkpoint(tmp_path))["step"] == 2 and "global_step_1" in caplog.text
    assert not (tmp_path / ".save.lock").exists()


def run_again(path: str) -> int:
    """Save in the directory of an earlier run that made more steps."""
    worker = critic({})
    for step in (90, 100, 5):
        worker.save_checkpoint(path, global_step=step, max_to_keep=2)
    with pytest.raises(ConfigError) as caught:
        worker.save_checkpoint(path, global_step=6, max_to_keep=0)
    assert (caught.value.key, caught.value.value) == ("max_to_keep", 0)
    return worker.load_checkpoint(path)


@pytest.mark.simulated
def test_checkpoint_just_written_is_never_deleted(tmp_path: Path) -> None:
    assert run_ranks(run_again, 1, str(tmp_path)) == [5]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names_of(5, 100)


def unwritable_and_unreadable(path: str) -> list[str]:
    """Save where rank 0 cannot create the directory; load where rank 1 finds no checkpoint; return the paths."""
    worker = critic({})
    with pytest.raises(DataError) as unwritable:
        worker.save_checkpoint(f"{path}/file/run")
    worker.save_checkpoint(path, global_step=3)
    with pytest.raises(DataError) as unreadable:
        worker.load_checkpoint(path if worker.rank == 0 else f"{path}/elsewhere")
    return [unwritable.value.path, unreadable.value.path]


@pytest.mark.simulated
def test_path_that_one_rank_cannot_use_raises_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for unwritable, unreadable in run_ranks(unwritable_and_unreadable, 2, str(tmp_path)):
        assert unwritable == f"{tmp_path}/file/run/global_step_0"
        assert unreadable == f"{tmp_path}/elsewhere"


DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
FALLING = {"decay_style": "cosine", "warmup_steps": 2, "total_steps": 12, "min_lr": 1e-3}


def interrupted(path: str, resume: bool) -> dict[str, Any]:
    """Make two updates with dropout, the second in a new worker if ``resume``."""
    worker = actor({"tp": 2}, "actor", model=DROPOUT, optim=FALLING)
    batch = own_shard(experience(ROWS), worker)
    if resume:
        worker.load_checkpoint(path)
    else:
        worker.update_actor(batch)
        worker.save_checkpoint(path)
    metrics = worker.update_actor(batch).meta_info["metrics"]
    return {"metrics": metrics, "weights": weights(worker)}


@pytest.mark.processes
def test_random_numbers_and_learning_rate_continue(tmp_path: Path) -> None:
    whole, resumed = (forking.run_ranks(interrupted, 2, str(tmp_path), resume)[0] for resume in (False, True))
    assert resumed["metrics"] == whole["metrics"]
    assert 1e-3 < whole["metrics"]["actor/lr"] < 1e-2
    assert largest_difference(whole["weights"], resumed["weights"]) == 0


def rejected(path: str, how: str) -> DataError:
    with pytest.raises(DataError) as caught:
        match how:
            case "larger":
                actor({}, "rollout", model={"num_layers": 5, "ffn_hidden_size": 96}).load_checkpoint(path)
            case "optimizer":
                actor({}, "actor", optim={"distributed_optimizer": True}).load_checkpoint(path)
            case "function":
                changes = {
                    "layernorm_epsilon": 1e-3,
                    "rotary_base": 500,
                    "activation": "gelu",
                    "num_attention_heads": 2,
                }
                actor({}, "rollout", model=changes | {"num_query_groups": 1, "kv_channels": 16}).load_checkpoint(path)
            case "nothing":
                actor({}, "rollout").load_checkpoint(f"{path}/elsewhere")
    return caught.value


def save_actor(path: str) -> None:
    worker = actor({}, "actor")
    worker.update_actor(experience(ROWS))
    worker.save_checkpoint(path)


@pytest.mark.simulated
def test_unsuitable_checkpoint_is_rejected_with_the_names_that_differ(tmp_path: Path) -> None:
    path = str(tmp_path)
    run_ranks(save_actor, 1, path)
    larger = run_ranks(rejected, 1, path, "larger")[0]
    assert any("linear_fc1.weight" in text and "[4, 128, 32]" in text for text in larger.differing)
    function = run_ranks(rejected, 1, path, "function")[0].differing
    assert function["layernorm_epsilon"] == (1e-5, 1e-3) and function["rotary_base"] == (10000, 500)
    assert {"activation_func", "num_attention_heads"} < function.keys()
    assert run_ranks(rejected, 1, path, "optimizer")[0].distributed_optimizer is False
    assert run_ranks(rejected, 1, path, "nothing")[0].path == f"{path}/elsewhere"


def rejected_vocabulary(path: str) -> Any:
    actor({"tp": 2}, "rollout").save_checkpoint(path)
    with pytest.raises(DataError) as caught:
        actor({"tp": 2}, "rollout", model={"vocab_size": MODEL["vocab_size"] + 1}).load_checkpoint(path)
    return caught.value


@pytest.mark.simulated
def test_another_vocabulary_of_the_same_padded_size_is_rejected(tmp_path: Path) -> None:
    assert MODEL["vocab_size"] % 2 == 1
    for error in run_ranks(rejected_vocabulary, 2, str(tmp_path)):
        assert error.differing and all("embedding" in text or "output_layer" in text for text in error.differing)


def drawn_after_another_devices_state() -> list[torch.Tensor]:
    with actor({}, "rollout").call_context("load_checkpoint"):
        state = random_state()
        numbers = [torch.rand(3)]
        set_random_state(state | {"device": torch.zeros(16, dtype=torch.uint8)})  # as long as CUDA's
        return [*numbers, torch.rand(3)]


@pytest.mark.simulated
def test_of_the_random_state_of_another_device_only_the_hosts_is_restored() -> None:
    [(before, after)] = run_ranks(drawn_after_another_devices_state, 1)
    assert torch.equal(before, after)
