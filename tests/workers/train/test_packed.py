"""Rows packed into one sequence have the results of padded rows, and cost only their own tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import (
    MODEL,
    VOCAB,
    actor,
    be_a_worker,
    callable_directly,
    largest_difference,
    own_shard,
    weights,
)
from workers.config import RewardConfig, load_config
from workers.reward import RewardModelWorker

pytestmark = pytest.mark.simulated

TOLERANCE = 1e-5
LENGTHS = (61, 3, 2, 40, 5, 17, 3, 2, 29, 4, 8, 3)
LONG = MODEL | {"max_sequence_length": 64}
ROLLOUT = {"prompt_length": 32, "response_length": 32}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-process": (1, {}),
    "tp2-cp2-sp": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "pp2-vpp2-dp2": (4, {"pp": 2, "vpp": 2}),
}


def rows_from(start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens ``[rows, 64]`` of LENGTHS from column ``start`` ``[rows, 1]`` on, and their mask."""
    columns, lengths = torch.arange(64), torch.tensor(LENGTHS)[:, None]
    mask = ((columns >= start) & (columns < start + lengths)).long()
    return torch.randint(2, VOCAB, mask.shape, generator=torch.Generator().manual_seed(8)) * mask, mask


def sentences() -> DataProto:
    """Return rows alternately at the left and the right edge, with a loss on all but the first token."""
    start = (64 - torch.tensor(LENGTHS)[:, None]) * (torch.arange(len(LENGTHS))[:, None] % 2)
    ids, mask = rows_from(start)
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "loss_mask": mask * (torch.arange(64) > start)}
    )


def samples() -> DataProto:
    """Return rows whose second half is the response, which begins in column 32."""
    ids, mask = rows_from(32 - (torch.tensor(LENGTHS)[:, None] + 1) // 2)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "responses": ids[:, 32:]})


def computed(parallel: dict[str, Any], packed: bool, max_tokens: int) -> dict[str, Any]:
    """Return scores of actor, reference and reward model, and weights and metrics of two supervised updates."""
    worker = actor(
        parallel,
        "actor_ref",
        model=LONG,
        rollout=ROLLOUT,
        packed=packed,
        ppo_micro_batch_size=3,
        ppo_max_tokens_per_micro_batch=max_tokens,
    )
    be_a_worker()
    settings = {"model": LONG, "parallel": parallel, "packed": packed}
    sizes = {"micro_batch_size": 3, "max_tokens_per_micro_batch": max_tokens}
    judge = callable_directly(RewardModelWorker(load_config(RewardConfig, settings, sizes)))
    judge.init_model()
    batch, shard = samples(), own_shard(sentences(), worker)
    mine = own_shard(batch, worker)
    results = [worker.compute_log_prob(mine), worker.compute_ref_log_prob(mine), judge.compute_rm_score(mine)]
    metrics = [worker.update_sft(shard).meta_info["metrics"] for _ in range(2)]
    names = ("old_log_probs", "ref_log_prob", "rm_scores")
    scores = None if results[0] is None else {name: one.batch[name] for name, one in zip(names, results, strict=True)}
    return {"dp": worker.context.pg.dp.rank(), "scores": scores, "metrics": metrics[-1], "weights": weights(worker)}


@functools.cache
def padded() -> dict[str, Any]:
    return run_ranks(computed, 1, {}, False, 0)[0]


@pytest.mark.parametrize(
    ("layout", "max_tokens"), [("one-process", 0), ("one-process", 64), ("tp2-cp2-sp", 64), ("pp2-vpp2-dp2", 0)]
)
def test_packed_rows_have_the_results_of_padded_ones(layout: str, max_tokens: int) -> None:
    world_size, parallel = LAYOUTS[layout]
    expected = padded()
    ranks = run_ranks(computed, world_size, parallel, True, max_tokens)
    shards = 1 + max(rank["dp"] for rank in ranks)
    assert largest_difference(expected["weights"], ranks[0]["weights"]) < TOLERANCE
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE, rel=TOLERANCE)
        if rank["scores"] is not None:
            whole = {name: column.chunk(shards)[rank["dp"]] for name, column in expected["scores"].items()}
            assert all(float(column.abs().max()) > 0.1 for column in whole.values())
            assert largest_difference(whole, rank["scores"]) < TOLERANCE


def input_shapes(packed: bool) -> list[tuple[int, int]]:
    """Return the shapes of the token ids that reach the model, in scoring and in training."""
    worker = actor(
        {}, "actor", model=LONG, rollout=ROLLOUT, packed=packed, ppo_max_tokens_per_micro_batch=80, share_prompts=False
    )
    shapes: list[tuple[int, int]] = []
    embedding = worker.model[0].module.embedding
    embedding.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    worker.compute_log_prob(samples())
    worker.update_sft(sentences())
    return shapes


def test_packed_pass_has_only_the_tokens_of_its_rows() -> None:
    packed, padded_ = run_ranks(input_shapes, 1, True)[0], run_ranks(input_shapes, 1, False)[0]
    assert all(rows == 1 and tokens <= 80 for rows, tokens in packed)
    assert sum(tokens for _, tokens in packed) == 2 * sum(LENGTHS)
    assert len(packed) == 2 * -(-sum(LENGTHS) // 80) < len(padded_)
    assert sum(rows * tokens for rows, tokens in padded_) > 2 * sum(LENGTHS)
