"""Responses made in slices, among others that join and leave, against one call for the whole batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import CallRejected, DataError
from mcontroller.ppo.agents.trajectories import Submitted, TrajectoryRollout, trajectory_batch
from mcontroller.testing import SimulatedGroupMaker
from parallel_state.layout import ParallelLayout
from tests.workers.roles import MODEL, OPTIM, PROMPT, SAMPLED, prompts
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

LONGEST, ROWS = 16, 7
SEEDS = [(-1) ** row * (row + 5) * 10**17 for row in range(ROWS)]


def a_group(simulated_group: SimulatedGroupMaker, layout: ParallelLayout, parallel: dict[str, int]) -> Any:
    config = {
        "model": MODEL,
        "optim": OPTIM | {"lr": 0.1},
        "parallel": parallel,
        "rollout": {"prompt_length": PROMPT, "response_length": LONGEST},
        "ppo_mini_batch_size": ROWS,
        "ppo_micro_batch_size": ROWS,
    }
    group = simulated_group(ActorRolloutRefWorker, layout, load_config(ActorConfig, config), "actor_rollout")
    group.init_model()
    return group


def in_one_call(group: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities of responses with ``SEEDS``."""
    seeds = {"sample_seed": torch.tensor(SEEDS), "generated": torch.zeros(ROWS, dtype=torch.long)}
    made = group.generate_sequences(prompts(ROWS, SAMPLED).with_tensors(seeds)).batch
    rows = zip(made["responses"], made["rollout_log_probs"], made["response_mask"].bool(), strict=True)
    tokens, scores = zip(*((ids[kept].tolist(), values[kept].tolist()) for ids, values, kept in rows), strict=True)
    return [*tokens], [*scores]


def plain_prompts() -> list[list[int]]:
    batch = prompts(ROWS, {}).batch
    return [ids[kept].tolist() for ids, kept in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)]


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        (ParallelLayout(1), {}),
        (ParallelLayout(2, tp=2), {"tp": 2}),
        (ParallelLayout(2, pp=2), {"pp": 2}),
        (ParallelLayout(2), {}),
    ],
    ids=["one", "tp2", "pp2", "dp2"],
)
def test_tokens_do_not_depend_on_slices_nor_on_what_joins_and_leaves(
    simulated_group: SimulatedGroupMaker, layout: ParallelLayout, parallel: dict[str, int]
) -> None:
    tokens, scores = in_one_call(a_group(simulated_group, ParallelLayout(1), {}))
    group = a_group(simulated_group, layout, parallel)
    chance = random.Random(str(layout))
    rollout = TrajectoryRollout(group, slice_tokens=3, capacity=4, **SAMPLED)
    waiting, inflight, others = list(enumerate(plain_prompts())), {}, list[Submitted]()
    while waiting or len(rollout):
        while waiting and chance.random() < 0.6:
            row, prompt = waiting.pop(chance.randrange(len(waiting)))
            inflight[row] = rollout.submit(prompt, seed=SEEDS[row])
            others.append(rollout.submit(prompt[:2], temperature=chance.choice([0.5, 1.0])))
        if others and chance.random() < 0.5:
            others.pop().cancel()
        rollout.slice_tokens = chance.choice([1, 2, 3, 5])
        rollout.advance()
    assert [inflight[row].result().tokens.tolist() for row in range(ROWS)] == tokens
    assert len({len(row) for row in tokens}) > 2  # they leave at different moments
    found = torch.tensor([score for row in range(ROWS) for score in inflight[row].result().log_probs])
    torch.testing.assert_close(found, torch.tensor([score for row in scores for score in row]), atol=1e-5, rtol=0)


def test_the_versions_of_tokens_change_exactly_where_the_weights_move(simulated_group: SimulatedGroupMaker) -> None:
    """The log-probability of each token is that of the policy of its version, and of no other."""

    def moves(group: Any) -> Iterator[tuple[int, Any]]:
        yield 0, group
        for version in (1, 2):
            train(group)
            yield version, group

    rollout, made, slices = None, [], {0: 1, 1: 2, 2: 0}
    for version, group in moves(a_group(simulated_group, ParallelLayout(1), {})):
        rollout = rollout or TrajectoryRollout(group, slice_tokens=2, **SAMPLED)
        made += [rollout.submit(prompt, seed=seed) for prompt, seed in zip(plain_prompts(), SEEDS, strict=True)]
        for _ in range(slices[version]):
            rollout.advance()
    results = [each.result() for each in made]
    for row, each in enumerate(results):
        batches = {0: [0] * 2 + [1] * 4, 1: [1] * 4, 2: []}[row // ROWS]
        assert each.versions.tolist() == (batches + [2] * LONGEST)[: len(each.tokens)]
    whole = trajectory_batch(results, prompt_length=PROMPT, response_length=LONGEST, pad_token_id=0)
    sampled, versions = whole["rollout_log_probs"], whole["token_versions"]
    for version, group in moves(a_group(simulated_group, ParallelLayout(1), {})):
        scored = group.compute_log_prob(DataProto.from_dict(whole)).batch["old_log_probs"]
        of_version = versions == version
        torch.testing.assert_close(sampled[of_version], scored[of_version], atol=1e-5, rtol=0)
        assert (sampled - scored)[(versions >= 0) & ~of_version].abs().median() > 1e-3
    assert whole["policy_version"].unique().tolist() == [0, 1, 2]


def train(group: Any) -> None:
    batch = group.generate_sequences(prompts(ROWS, SAMPLED))
    advantages = torch.linspace(-1, 1, ROWS)[:, None] * batch.batch["response_mask"]
    old = batch.batch["rollout_log_probs"]
    group.update_actor(batch.with_tensors({"advantages": advantages, "old_log_probs": old}))


def test_trajectories_are_awaited_and_cancelled_on_a_group(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    tokens, _ = in_one_call(group)
    group.trajectories.slice_tokens = 2
    cancelled = group.submit(plain_prompts()[5], **SAMPLED)

    async def both() -> list[list[int]]:
        first = await group.submit(plain_prompts()[0], seed=SEEDS[0], **SAMPLED)
        cancelled.cancel()
        second = group.submit(plain_prompts()[2], seed=SEEDS[2], **SAMPLED)
        return [first.tokens.tolist(), (await second).tokens.tolist()]

    assert asyncio.run(both()) == [tokens[0], tokens[2]]
    with pytest.raises(CancelledError):
        cancelled.result()
    assert len(cancelled.trajectory.tokens) == 2 and len(group.trajectories) == 0


def test_a_turn_goes_on_from_the_tokens_of_the_one_before(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    whole, prompt = in_one_call(group)[0][1], plain_prompts()[1]
    turn = group.submit(prompt, seed=SEEDS[1], stop_token_ids=[whole[2]], **SAMPLED).result()
    assert turn.ended == "turn" and turn.tokens.tolist() == whole[: whole.index(whole[2]) + 1]
    assert group.submit(turn, **SAMPLED).result().tokens.tolist() == whole
    assert turn.ended == ("stop" if whole[-1] == SAMPLED["eos_token_id"] else "length")
    with pytest.raises(DataError, match=r"the response has \d+ tokens already, and the most are 3"):
        group.submit(turn, response_length=3, **SAMPLED)
    with pytest.raises(DataError, match="token 99 is outside of the vocabulary, 0 to 60"):
        group.submit([99], **SAMPLED)
    with pytest.raises(DataError, match=r"the prompt has 11 tokens, expected 1 to rollout.prompt_length, which is 10"):
        group.submit([5] * 11, **SAMPLED)


def test_seeds_for_several_samples_of_a_row_are_rejected(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    batch = prompts(2, SAMPLED | {"n": 2}).with_tensors({"sample_seed": torch.tensor([1, 2])})
    with pytest.raises(CallRejected, match="expected sample_seed, and with it generated, each int64"):
        group.generate_sequences(batch)
