"""Weights move under trajectories in flight: each token has the log-probability of the policy of its version."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from tests.vllm.policies import EOS, PAD, PROMPT, VOCAB, Actor, actor_config, prompts
from tests.vllm.test_vllm_rollout import GREEDY, TOLERANCE, update
from trainer import Trajectory, TrajectoryRollout
from trainer.rollout.trajectories import trajectory_batch

TRAJECTORIES, RESPONSE, UPDATES = 200, 24, 3
CALLS = range(3, 16)  # tokens that call a tool


def worst_by_version(group: MegatronRayWorkerGroup, made: Sequence[Trajectory], version: int) -> list[float]:
    """Return how far the log-probabilities of a version's tokens, and of older ones, are from the present policy."""
    columns = trajectory_batch(made, prompt_length=PROMPT, response_length=RESPONSE, pad_token_id=PAD)
    scored = group.compute_log_prob(DataProto.from_dict(columns, meta_info={"temperature": 1.0}))
    away = (scored.batch["old_log_probs"] - columns["rollout_log_probs"]).abs()
    versions = columns["token_versions"]
    present, older = versions == version, (versions >= 0) & (versions < version)
    return [float(away[chosen].max()) for chosen in (present, older) if chosen.any()]


def test_tokens_in_flight_have_the_log_probs_of_their_versions(ray_cluster: None) -> None:
    draws = random.Random(7)
    config = actor_config("dense-tp2", parallel={"tp": 1}, rollout={"response_length": RESPONSE})
    created = RayClassWithInitArgs(Actor, config, role="actor_rollout")
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="flying", max_colocate_count=1) as pool,
        MegatronRayWorkerGroup(pool, created, name_prefix="flying") as group,
    ):
        group.init_model()
        trained = group.generate_sequences(prompts(**GREEDY))
        rollout = TrajectoryRollout(group, slice_tokens=3, driven=True, eos_token_id=EOS, pad_token_id=PAD)
        made = []
        for _ in range(TRAJECTORIES):
            length = draws.randint(4, RESPONSE)
            prompt = [draws.randrange(3, VOCAB) for _ in range(draws.randint(3, 40))]
            made.append(rollout.submit(prompt, response_length=length, stop_token_ids=CALLS).trajectory)
        figures, in_flight = [], []
        for version in range(UPDATES + 1):
            for _ in range(2 if version < UPDATES else RESPONSE):
                if not rollout.start():
                    break
                for ended in rollout.take():
                    trajectory = ended.trajectory
                    if trajectory.ended == "turn" and len(trajectory.tokens) + 2 < ended.limit:
                        trajectory.replied([draws.randrange(3, VOCAB), 3])  # what a tool returned
                        rollout.submit(trajectory, response_length=ended.limit, stop_token_ids=CALLS)
            figures.append(worst_by_version(group, [each for each in made if each.tokens], version))
            in_flight.append(len(rollout))
            if version < UPDATES:
                update(group, trained)
    print("in flight at each update:", in_flight, "largest differences:", figures)  # noqa: T201
    assert in_flight[-1] == 0 and min(in_flight[:-1]) > TRAJECTORIES // 10
    assert sum(len({*each.versions} - {-1}) > 1 for each in made) > TRAJECTORIES // 2
    assert sum(each.turns > 1 for each in made) > TRAJECTORIES // 4
    assert {version for each in made for version in each.versions} == {-1, *range(UPDATES + 1)}
    assert max(each[0] for each in figures) < TOLERANCE
    assert min(each[1] for each in figures[1:]) > 100 * TOLERANCE  # another policy would be noticed
