"""Responses made in steps, among others that join and leave, against one call for the whole batch."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import CallRejected, DataError
from mcontroller.testing import SimulatedGroupMaker
from parallel_state.layout import ParallelLayout
from tests.workers.roles import MODEL, OPTIM, PROMPT, SAMPLED, prompts
from trainer.rollout.reference_engine import ReferenceEngine
from trainer.rollout.trajectories import Submitted, TrajectoryRollout, trajectory_batch
from trainer.rollout.trajectory import Trajectory
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

LONGEST, ROWS = 16, 7
SEEDS = [(-1) ** row * (row + 5) * 10**17 for row in range(ROWS)]


def a_group(
    simulated_group: SimulatedGroupMaker,
    layout: ParallelLayout,
    parallel: dict[str, int],
    seed: int = 0,
    role: str = "actor_rollout",
    **changes: Any,
) -> Any:
    config = {
        "model": MODEL,
        "optim": OPTIM | {"lr": 0.1},
        "parallel": parallel,
        "rollout": {"prompt_length": PROMPT, "response_length": LONGEST, "seed": seed},
        "ppo_mini_batch_size": ROWS,
        "ppo_micro_batch_size": ROWS,
        **changes,
    }
    group = simulated_group(ActorRolloutRefWorker, layout, load_config(ActorConfig, config), role)
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
        (ParallelLayout(2, pp=2), {"pp": 2}),
        (ParallelLayout(2), {}),
    ],
    ids=["pp2", "dp2"],
)
def test_tokens_do_not_depend_on_steps_nor_on_what_joins_and_leaves(
    simulated_group: SimulatedGroupMaker, layout: ParallelLayout, parallel: dict[str, int]
) -> None:
    tokens, scores = in_one_call(a_group(simulated_group, ParallelLayout(1), {}))
    group = a_group(simulated_group, layout, parallel)
    chance = random.Random(str(layout))
    engine = ReferenceEngine(group, step_tokens=3, max_rows=4)
    rollout = TrajectoryRollout(group, engines=[engine], **SAMPLED)
    waiting, inflight, others = list(enumerate(plain_prompts())), {}, list[Submitted]()
    while waiting or len(rollout):
        while waiting and chance.random() < 0.6:
            row, prompt = waiting.pop(chance.randrange(len(waiting)))
            inflight[row] = rollout.submit(prompt, seed=SEEDS[row])
            others.append(rollout.submit(prompt[:2], temperature=chance.choice([0.5, 1.0])))
        if others and chance.random() < 0.5:
            others.pop().cancel()
        engine.step_tokens = chance.choice([1, 2, 3, 5])
        rollout.advance()
    assert [inflight[row].result().tokens.tolist() for row in range(ROWS)] == tokens
    assert len({len(row) for row in tokens}) > 2  # they leave at different moments
    found = torch.tensor([score for row in range(ROWS) for score in inflight[row].result().log_probs])
    torch.testing.assert_close(found, torch.tensor([score for row in scores for score in row]), atol=1e-5, rtol=0)


def test_reference_engines_behind_a_router_make_the_same_tokens(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    tokens, _ = in_one_call(group)
    engines = [ReferenceEngine(group, step_tokens=5), ReferenceEngine(group, step_tokens=3, max_rows=1)]
    rollout = TrajectoryRollout(group, engines=engines, **SAMPLED)
    made = [rollout.submit(prompt, seed=seed) for prompt, seed in zip(plain_prompts(), SEEDS, strict=True)]
    assert [submitted.result(60).tokens.tolist() for submitted in made] == tokens
    assert rollout.router is not None and not rollout.router.lost


def test_the_versions_of_tokens_change_exactly_where_the_weights_move(simulated_group: SimulatedGroupMaker) -> None:
    """The log-probability of each token is that of the policy of its version, and of no other."""

    def moves(group: Any) -> Iterator[tuple[int, Any]]:
        yield 0, group
        for version in (1, 2):
            train(group)
            yield version, group

    rollout, made, slices = None, [], {0: 1, 1: 2, 2: 0}
    for version, group in moves(a_group(simulated_group, ParallelLayout(1), {})):
        engines = [ReferenceEngine(group, step_tokens=2)]
        rollout = rollout or TrajectoryRollout(group, engines=engines, **SAMPLED)
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
    rollout = TrajectoryRollout(group, engines=[ReferenceEngine(group, step_tokens=2)])
    cancelled = rollout.submit(plain_prompts()[5], **SAMPLED)

    async def both() -> list[list[int]]:
        first = await rollout.submit(plain_prompts()[0], seed=SEEDS[0], **SAMPLED)
        cancelled.cancel()
        second = rollout.submit(plain_prompts()[2], seed=SEEDS[2], **SAMPLED)
        return [first.tokens.tolist(), (await second).tokens.tolist()]

    assert asyncio.run(both()) == [tokens[0], tokens[2]]
    with pytest.raises(CancelledError):
        cancelled.result()
    assert len(cancelled.trajectory.tokens) == 2 and len(rollout) == 0


def test_a_turn_goes_on_from_the_tokens_of_the_one_before(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    whole, prompt = in_one_call(group)[0][1], plain_prompts()[1]
    rollout = TrajectoryRollout(group)
    turn = rollout.submit(prompt, seed=SEEDS[1], stop_token_ids=[whole[2]], **SAMPLED).result()
    assert turn.ended == "turn" and turn.tokens.tolist() == whole[: whole.index(whole[2]) + 1]
    assert rollout.submit(turn, **SAMPLED).result().tokens.tolist() == whole
    assert turn.ended == ("stop" if whole[-1] == SAMPLED["eos_token_id"] else "length")
    with pytest.raises(DataError) as caught:
        rollout.submit(turn, response_length=3, **SAMPLED)
    assert caught.value.length == 16
    with pytest.raises(DataError) as caught:
        rollout.submit([99], **SAMPLED)
    assert (caught.value.field, caught.value.token) == ("prompt", 99)
    with pytest.raises(DataError) as caught:
        rollout.submit([5] * 11, **SAMPLED)
    assert caught.value.length == 11


TEMPERATURES = [1.0, 0.2, 3.0, 0.7, 1.0, 0.2, 3.0]


@pytest.mark.parametrize(
    ("layout", "parallel", "changes"),
    [
        (ParallelLayout(1), {}, {"log_prob_chunk_tokens": 3}),
        (ParallelLayout(2, tp=2), {"tp": 2}, {}),
        (ParallelLayout(2, cp=2), {"cp": 2}, {}),
        (ParallelLayout(2), {}, {"packed": True}),
        (ParallelLayout(1), {}, {"share_prompts": False}),
    ],
    ids=["one", "tp2", "cp2", "packed dp2", "not shared"],
)
def test_tokens_are_scored_at_the_temperature_of_their_request(
    simulated_group: SimulatedGroupMaker, layout: ParallelLayout, parallel: dict[str, int], changes: dict[str, Any]
) -> None:
    """The second turn of each response has another temperature than the first."""
    columns, meta_info = of_two_turns(a_group(simulated_group, ParallelLayout(1), {}))
    group = a_group(simulated_group, layout, parallel, role="actor", **changes)
    mask = columns["response_mask"].bool()
    scored = group.compute_log_prob(DataProto.from_dict(columns, meta_info=meta_info)).batch["old_log_probs"]
    torch.testing.assert_close(scored[mask], columns["rollout_log_probs"][mask], atol=1e-5, rtol=0)
    others = {name: column for name, column in columns.items() if name != "token_temperatures"}
    at_one = group.compute_log_prob(DataProto.from_dict(others, meta_info=meta_info)).batch["old_log_probs"]
    assert (at_one - scored)[mask & (columns["token_temperatures"] != 1.0)].abs().median() > 0.1
    rows = {**columns, "advantages": mask.float(), "old_log_probs": columns["rollout_log_probs"]}
    metrics = group.update_actor(DataProto.from_dict(rows, meta_info=meta_info)).meta_info["metrics"]
    assert max(metrics["actor/ratio_max"]) == pytest.approx(1.0, abs=1e-4)


def of_two_turns(group: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The columns of responses of two turns, and their ``meta_info``."""
    rollout, made = TrajectoryRollout(group, **SAMPLED), []
    for row, prompt in enumerate(plain_prompts()):
        turn = rollout.submit(prompt, seed=SEEDS[row], max_tokens=4, temperature=TEMPERATURES[row]).result()
        assert turn.ended in ("max_tokens", "stop")
        turn.replied([7, 8])
        made.append(rollout.submit(turn, temperature=TEMPERATURES[-1 - row]).result())
        sampled = [TEMPERATURES[row]] * (turn.turn - 2), [TEMPERATURES[-1 - row]] * (len(turn.tokens) - turn.turn)
        assert turn.temperatures.tolist() == [*sampled[0], 1.0, 1.0, *sampled[1]]
    columns = trajectory_batch(made, prompt_length=PROMPT, response_length=LONGEST, pad_token_id=0)
    return columns, rollout.meta_info(1)


def test_the_most_probable_tokens_of_a_request_cannot_be_scored(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    rollout = TrajectoryRollout(group)
    made = [rollout.submit(plain_prompts()[1], temperature=value, **SAMPLED).result() for value in (1.0, 0)]
    rows = trajectory_batch(made, prompt_length=PROMPT, response_length=LONGEST, pad_token_id=0)
    with pytest.raises(CallRejected) as caught:
        group.compute_log_prob(DataProto.from_dict(rows))
    assert (caught.value.role, caught.value.rank) == ("simulated", 0)
    rollout = TrajectoryRollout(group, trained=True, **SAMPLED)
    for settings in ({"temperature": 0.0}, {"top_p": 0}, {"do_sample": False}):
        with pytest.raises(DataError) as caught:
            rollout.submit(plain_prompts()[1], **settings)
        assert caught.value.value == 0.0
        assert caught.value.field == "temperature"


def test_requests_without_a_seed_get_distinct_responses(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    prompt = plain_prompts()[1]
    submit = TrajectoryRollout(group).submit
    made = [submit(Trajectory(prompt), **SAMPLED).result() for _ in range(4)]
    made += [TrajectoryRollout(group, **SAMPLED).submit(prompt).result() for _ in range(2)]
    turn = submit(prompt, seed=1, max_tokens=1, **SAMPLED).result()
    made += [submit(copy.deepcopy(turn), **SAMPLED).result() for _ in range(3)] + [submit(turn, **SAMPLED).result()]
    assert len({tuple(each.tokens[1:]) for each in made}) == len(made)
    assert made[-1].tokens == submit(prompt, seed=1, **SAMPLED).result().tokens
    again = a_group(simulated_group, ParallelLayout(1), {})
    assert TrajectoryRollout(again).submit(Trajectory(prompt), **SAMPLED).result().tokens == made[0].tokens
    other = a_group(simulated_group, ParallelLayout(1), {}, seed=5)
    assert TrajectoryRollout(other).submit(Trajectory(prompt), **SAMPLED).result().tokens != made[0].tokens


def test_held_out_samples_neither_change_training_samples_nor_repeat_them(simulated_group: SimulatedGroupMaker) -> None:
    def sample(group: Any, **meta_info: Any) -> list[list[int]]:
        batch = group.generate_sequences(prompts(ROWS, SAMPLED | meta_info)).batch
        return batch["responses"].tolist()

    one, other = (a_group(simulated_group, ParallelLayout(1), {}) for _ in range(2))
    first, held_out, second = sample(one), [sample(one, held_out_batch=number) for number in (0, 1, 0)], sample(one)
    assert [sample(other), sample(other)] == [first, second] and held_out[0] == held_out[2]
    distinct = (first, second, held_out[0], held_out[1])
    assert len({str(each) for each in distinct}) == 4


def test_seeds_for_several_samples_of_a_row_are_rejected(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    batch = prompts(2, SAMPLED | {"n": 2}).with_tensors({"sample_seed": torch.tensor([1, 2])})
    with pytest.raises(CallRejected) as caught:
        group.generate_sequences(batch)
    assert (caught.value.role, caught.value.rank) == ("simulated", 0)
