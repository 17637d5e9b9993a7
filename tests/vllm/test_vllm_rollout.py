"""Actors on Ray with vLLM as their rollout: its log-probabilities are the policy's, also after updates."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, WorkerError
from tests.vllm.policies import EOS, PAD, POLICIES, RESPONSE, Actor, actor_config, prompts

TOLERANCE = 1e-4
GREEDY = {"do_sample": False}
FILTERED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "n": 2}


@pytest.fixture(scope="module", params=POLICIES)
def actor(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[MegatronRayWorkerGroup]:
    created = RayClassWithInitArgs(Actor, actor_config(request.param), role="actor_rollout")
    with (
        RayResourcePool([2], use_gpu=False, name_prefix="vllm", max_colocate_count=1) as pool,
        MegatronRayWorkerGroup(pool, created, name_prefix=request.param) as group,
    ):
        group.init_model()
        yield group


def worst_difference(actor: MegatronRayWorkerGroup, batch: DataProto) -> float:
    """The largest difference between the log-probabilities of the engine and of ``compute_log_prob``."""
    policy = actor.compute_log_prob(batch).batch["old_log_probs"]
    return ((policy - batch.batch["rollout_log_probs"]) * batch.batch["response_mask"]).abs().max().item()


def update(actor: MegatronRayWorkerGroup, batch: DataProto) -> None:
    generator = torch.Generator().manual_seed(6)
    trained = batch.union(actor.compute_log_prob(batch))
    shape = batch.batch["responses"].shape
    trained.batch["advantages"] = torch.randn(shape, generator=generator) * batch.batch["response_mask"]
    trained.meta_info.pop("metrics", None)
    actor.update_actor(trained)


def test_log_probs_are_those_of_the_policy_before_and_after_updates(
    actor: MegatronRayWorkerGroup,
) -> None:
    greedy = actor.generate_sequences(prompts(**GREEDY))
    assert min(greedy.meta_info["metrics"]["rollout/update_bytes"]) > 100_000
    figures = [worst_difference(actor, greedy), worst_difference(actor, actor.generate_sequences(prompts(**FILTERED)))]
    for _ in range(2):
        stale = greedy
        update(actor, greedy)
        assert worst_difference(actor, stale) > 100 * TOLERANCE  # the old weights would be noticed
        greedy = actor.generate_sequences(prompts(**GREEDY))
        assert not torch.equal(greedy.batch["responses"], stale.batch["responses"])
        figures.append(worst_difference(actor, greedy))
    figures.append(worst_difference(actor, actor.generate_sequences(prompts(**FILTERED))))
    print("largest differences of log-probabilities:", " ".join(f"{figure:.1e}" for figure in figures))  # noqa: T201
    assert max(figures) < TOLERANCE


def test_sleep_reports_the_bytes_that_it_freed_and_changes_no_response(
    actor: MegatronRayWorkerGroup,
) -> None:
    before = actor.generate_sequences(prompts(**GREEDY))
    assert actor.offload(["rollout"]) == [0, 0]  # on a CPU vLLM frees nothing
    after = actor.generate_sequences(prompts(**GREEDY))
    assert "rollout/update_bytes" in after.meta_info["metrics"]
    assert torch.equal(before.batch["responses"], after.batch["responses"])


def test_the_same_seeds_draw_the_same_samples_and_each_sample_has_its_own(actor: MegatronRayWorkerGroup) -> None:
    """``policies.actor_config`` sets ``rollout.vllm.seeds``."""

    def sampled(**meta_info: int) -> torch.Tensor:
        actor.repeat_sampling()
        batch = actor.generate_sequences(prompts(n=3, **meta_info))
        assert torch.equal(batch.batch["prompts"], prompts().batch["input_ids"].repeat_interleave(3, 0))
        return batch.batch["responses"]

    first = sampled()
    assert torch.equal(first, sampled())
    assert not torch.equal(first, sampled(seed=4))
    for samples in first.view(-1, 3, RESPONSE):
        assert not torch.equal(samples[0], samples[1]) and not torch.equal(samples[1], samples[2])


def test_a_response_ends_with_the_first_of_the_stop_tokens(actor: MegatronRayWorkerGroup) -> None:
    whole = actor.generate_sequences(prompts(**GREEDY)).batch["responses"]
    stops = [int(whole[0, 4]), int(whole[1, 2]), EOS]
    batch = actor.generate_sequences(prompts(eos_token_id=stops, **GREEDY)).batch
    for row, expected in zip(batch["responses"], whole, strict=True):
        ends = torch.isin(expected, torch.tensor(stops)).nonzero().flatten()
        length = int(ends[0]) + 1 if len(ends) else RESPONSE
        assert torch.equal(row[:length], expected[:length]) and (row[length:] == PAD).all()
    assert batch["response_mask"][0].sum() <= 5 and batch["response_mask"][1].sum() <= 3
    assert (batch["rollout_log_probs"] * (1 - batch["response_mask"]) == 0).all()


def test_a_batch_smaller_than_the_number_of_shards_is_generated(actor: MegatronRayWorkerGroup) -> None:
    batch = actor.generate_sequences(prompts(**GREEDY)[:1])
    assert len(batch) == 1


def test_prompts_of_more_tokens_than_one_step_of_the_engine_are_sampled(actor: MegatronRayWorkerGroup) -> None:
    many = prompts(rows=64)
    assert many.batch["attention_mask"].sum() > 4096  # vLLM's default of tokens in one step
    assert worst_difference(actor, actor.generate_sequences(many)) < TOLERANCE


@pytest.mark.parametrize(
    ("signal", "cause", "at"),
    [("SIGKILL", "signal 9 (SIGKILL)", "listen"), ("SIGSTOP", "EngineHung: vLLM's engine", "begin_update")],
)
def test_an_engine_that_dies_or_hangs_is_reported_as_its_rank(
    ray_cluster: None, signal: str, cause: str, at: str
) -> None:
    limit = {"rollout": {"vllm": {"silence_timeout_s": 20.0}}} if signal == "SIGSTOP" else {}
    created = RayClassWithInitArgs(Actor, actor_config("dense-tp2", **limit), role="actor_rollout")
    name = f"{signal}-{at}"
    with (
        RayResourcePool([2], use_gpu=False, name_prefix=name, max_colocate_count=1) as pool,
        MegatronRayWorkerGroup(pool, created, name_prefix=name) as group,
    ):
        group.init_model()
        group.generate_sequences(prompts(**GREEDY))
        if at == "begin_update":
            group.offload(["rollout"])  # the next generation sends the weights first
        pids = group.engine_pid()
        assert None not in pids  # each rank of the shard has an engine
        group.signal_engine(signal)
        with pytest.raises(WorkerError) as caught:
            group.generate_sequences(prompts(**GREEDY))
        error = caught.value
        assert cause in error.cause and f"pid {pids[0]}" in error.cause  # that of the first rank, on all ranks
        assert at in error.cause


def shared_memory_of(session: int) -> set[str]:
    """Return the files in shared memory that the processes of a session have mapped."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getsid(int(maps.parent.name)) == session:
                mapped |= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return mapped - {"(deleted)"}


def test_an_engine_and_its_shared_memory_end_with_its_group(ray_cluster: None) -> None:
    created = RayClassWithInitArgs(Actor, actor_config("dense-tp2-engine-tp2"), role="actor_rollout")
    with RayResourcePool([2], use_gpu=False, name_prefix="ending", max_colocate_count=1) as pool:
        with MegatronRayWorkerGroup(pool, created, name_prefix="ending") as group:
            group.init_model()
            pid = group.engine_pid()[0]
            mapped = shared_memory_of(pid)
            assert mapped
        ended = os.pidfd_open(pid) if os.path.exists(f"/proc/{pid}") else None
        if ended is not None:
            assert wait([ended], 30), "the engine runs on without its worker"
        end = time.monotonic() + 30
        while left := [path for path in mapped if os.path.exists(path)]:
            assert time.monotonic() < end, f"left in shared memory: {left}"
            time.sleep(0.1)
