"""The optimizer's state in a checkpoint: loaded in another layout of experts, in another run, or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcontroller.errors import DataError
from parallel_state.simulated import CommunicationTrace
from parallel_state.simulated import run_ranks as run_simulated
from tests.ranks import run_ranks
from tests.workers.roles import actor, experience, largest_difference, own_shard, weights

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "none"},
}
TOGETHER, APART, STAGES = (1, {}), (2, {"ep": 2}), (2, {"pp": 2})


def save_and_go_on(parallel: dict[str, Any], path: str, **changes: Any) -> dict[str, Any]:
    worker = actor(parallel, "actor", ppo_epochs=1, **changes)
    batch = own_shard(experience(16), worker)
    worker.update_actor(batch)
    worker.save_checkpoint(path)
    metrics = worker.update_actor(batch).meta_info["metrics"]
    return {"metrics": metrics, "weights": weights(worker)}


def load_and_go_on(parallel: dict[str, Any], path: str, **changes: Any) -> dict[str, Any]:
    worker = actor(parallel, "actor", ppo_epochs=1, **changes)
    worker.load_checkpoint(path)
    metrics = worker.update_actor(own_shard(experience(16), worker)).meta_info["metrics"]
    groups = [group for part in worker.state.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    settings = {"betas": {group["betas"] for group in groups}, "scale": float(worker.state.optimizer.get_loss_scale())}
    return {"metrics": metrics, "weights": weights(worker)} | settings


def in_experts(
    fn: Any, layout: tuple[int, dict[str, Any]], path: Path, distributed: bool, trained: dict[str, Any]
) -> dict[str, Any]:
    return run_ranks(_in_experts, layout[0], fn, layout[1], str(path), distributed, trained)[0]


def _in_experts(
    fn: Any, parallel: dict[str, Any], path: str, distributed: bool, trained: dict[str, Any]
) -> dict[str, Any]:
    return fn(parallel, path, model=EXPERTS | trained, optim={"distributed_optimizer": distributed})


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("saved_in", "loaded_in", "distributed", "trained"),
    [
        (TOGETHER, APART, False, {}),
        (APART, TOGETHER, True, {"freeze": ["decoder.layers.0.*"]}),
        (STAGES, STAGES, False, {"train_only": ["output_layer.weight"]}),
    ],
    ids=["apart", "together, a frozen layer", "a stage without trained weights"],
)
def test_training_of_experts_continues_in_another_layout(
    saved_in: tuple[int, dict[str, Any]],
    loaded_in: tuple[int, dict[str, Any]],
    distributed: bool,
    trained: dict[str, Any],
    tmp_path: Path,
) -> None:
    """With experts on other ranks than the other weights, Megatron has two optimizers instead of one."""
    saved = in_experts(save_and_go_on, saved_in, tmp_path, distributed, trained)
    loaded = in_experts(load_and_go_on, loaded_in, tmp_path, distributed, trained)
    assert loaded["metrics"] == pytest.approx(saved["metrics"], abs=1e-5)
    assert largest_difference(saved["weights"], loaded["weights"]) < 1e-5


def in_another_run(path: str, resume: bool) -> dict[str, Any]:
    """Train in float16, whose first loss scales are too large for a step; the second run has other settings."""
    optim: dict[str, Any] = {"warmup_steps": 0}
    if resume:
        return load_and_go_on({}, path, model={"dtype": "float16"}, optim=optim | {"lr": 1e-3, "betas": (0.8, 0.99)})
    worker = actor({}, "actor", model={"dtype": "float16"}, optim=optim)
    while not worker.state.counters["optimizer_steps"]:
        worker.update_actor(experience(16))
    worker.save_checkpoint(path)
    return {"scale": float(worker.state.optimizer.get_loss_scale())}


@pytest.mark.simulated
def test_loss_scale_is_restored_and_settings_are_those_of_the_run(tmp_path: Path) -> None:
    saved, loaded = (run_ranks(in_another_run, 1, str(tmp_path), resume)[0] for resume in (False, True))
    assert loaded["scale"] <= saved["scale"] < 2.0**32
    assert loaded["metrics"]["actor/lr"] == 1e-3 and loaded["betas"] == {(0.8, 0.99)}


def rolled_back(path: str) -> float:
    """Make a step from the first weights, restore them, and make it again; return the difference."""
    worker, batch = actor({}, "actor"), experience(16)
    worker.save_checkpoint(path)
    worker.update_actor(batch)
    first = weights(worker)
    worker.load_checkpoint(path)
    worker.update_actor(batch)
    return largest_difference(first, weights(worker))


@pytest.mark.simulated
def test_loading_a_checkpoint_without_steps_resets_the_moments(tmp_path: Path) -> None:
    assert run_ranks(rolled_back, 1, str(tmp_path)) == [0.0]


def unreadable(path: str) -> list[DataError]:
    worker = actor({}, "actor")
    batch = experience(8)
    batch.batch["loss_mask"] = batch.batch["attention_mask"] * (batch.batch["attention_mask"].cumsum(1) > 1)
    worker.update_sft(batch)
    directory = Path(worker.save_checkpoint(path))
    other = actor({}, "actor")
    del other.trainer.phases["sft"]
    with pytest.raises(DataError) as unknown_phase:
        other.load_checkpoint(path)
    in_bfloat16 = actor({}, "actor", model={"dtype": "bfloat16"})
    with pytest.raises(DataError) as another_dtype:
        in_bfloat16.load_checkpoint(path)
    for file in directory.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError) as truncated:
        worker.load_checkpoint(path)
    return [unknown_phase.value, another_dtype.value, truncated.value]


@pytest.mark.simulated
def test_unknown_phase_missing_state_and_truncated_files_are_reported(tmp_path: Path) -> None:
    phase, dtype, truncated = run_ranks(unreadable, 1, str(tmp_path))[0]
    assert phase.phase == "sft"
    assert dtype.missing and all(name.startswith("optimizer.state.fp32_param.") for name in dtype.missing)
    assert (truncated.path, truncated.file) == (f"{tmp_path}/global_step_0/__0_0.distcp", "__0_0.distcp")


SHARDED = {"distributed_optimizer": True}
CHANGES: dict[str, dict[str, Any]] = {
    "tp2-dp2": {"model": {"dtype": "bfloat16"}},
    "ep2-dp2": {"model": EXPERTS},
}
AXES: dict[str, dict[str, Any]] = {"tp2-dp2": {"tp": 2}, "ep2-dp2": {"ep": 2}}


def in_buckets(parallel: dict[str, Any], path: str, changes: dict[str, Any], resume: bool) -> dict[str, Any]:
    """Make two updates; save in buckets after the first, or load that before the second."""
    optim = SHARDED | changes.get("optim", {})
    worker = actor(parallel, "actor", ppo_epochs=1, **changes | {"optim": optim})
    batch = own_shard(experience(16), worker)
    if resume:
        worker.load_checkpoint(path)
    else:
        worker.update_actor(batch)
        worker.save_checkpoint(path, reshardable=False)
    metrics = worker.update_actor(batch).meta_info["metrics"]
    return {"metrics": metrics, "weights": weights(worker)}


@pytest.mark.simulated
@pytest.mark.parametrize("layout", CHANGES)
def test_training_resumes_to_the_bit_from_a_save_in_buckets(layout: str, tmp_path: Path) -> None:
    run = AXES[layout], str(tmp_path), CHANGES[layout]
    whole, resumed = (run_ranks(in_buckets, 4, *run, resume)[0] for resume in (False, True))
    timings = {name for name in whole["metrics"] if "flops" in name or "mfu" in name}
    assert len(whole["metrics"].keys() - timings) > 8
    for name in whole["metrics"].keys() - timings:
        assert resumed["metrics"][name] == whole["metrics"][name], name
    assert largest_difference(whole["weights"], resumed["weights"]) == 0


def saved_with_trace(path: str, reshardable: bool, trace: CommunicationTrace) -> int:
    """Save with an empty trace, and return the number of this rank's parameters."""
    worker = actor({"tp": 2}, "actor", ppo_epochs=1, optim=SHARDED)
    worker.update_actor(own_shard(experience(16), worker))
    dist.barrier()
    trace.clear()
    dist.barrier()
    worker.save_checkpoint(path, reshardable=reshardable)
    return sum(parameter.numel() for chunk in worker.model for parameter in chunk.parameters())


def test_a_save_in_buckets_gathers_no_optimizer_over_dp(tmp_path: Path) -> None:
    gathered = {}
    for reshardable in (True, False):
        trace = CommunicationTrace()
        parameters = run_simulated(4, saved_with_trace, str(tmp_path), reshardable, trace, trace=trace)[0]
        gathered[reshardable] = trace.select(line="distrib_optimizer").nbytes
    assert gathered[True] >= 2 * 12 * parameters  # weights and two moments in float32, of two parts of the model
    assert gathered[False] == 0


def rejected(parallel: dict[str, Any], path: str) -> list[str]:
    worker = actor(parallel, "actor", optim=SHARDED, model={"seed": 9})
    before = weights(worker)
    with pytest.raises(DataError) as caught:
        worker.load_checkpoint(path)
    assert largest_difference(before, weights(worker)) == 0
    differing: list[str] = caught.value.differing
    return differing


@pytest.mark.simulated
def test_a_save_in_buckets_loads_with_other_dp_and_is_rejected_with_other_tp(tmp_path: Path) -> None:
    saved = run_ranks(in_buckets, 4, {"tp": 2}, str(tmp_path), {}, False)[0]
    resumed = run_ranks(in_buckets, 2, {"tp": 2}, str(tmp_path), {}, True)[0]
    assert largest_difference(saved["weights"], resumed["weights"]) < 1e-5
    for differing in run_ranks(rejected, 2, {"pp": 2}, str(tmp_path)):
        assert [text.split()[0] for text in differing] == ["tp", "pp"]
