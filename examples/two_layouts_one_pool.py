"""Two groups with other layouts on the same two bundles: an actor with tp 2 trains, a rollout with dp 2 generates.

Each group has one slot of every bundle, in processes of its own. After an update, slices of the weights go from the
ranks that have them to the ranks that need them.

python -m examples.two_layouts_one_pool
"""

from __future__ import annotations

import ray

from examples.loops.task import actor_config, problems, responses, right_answers, scores
from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from trainer import supervised_rows
from workers import ActorRolloutRefWorker, WeightTransfer

STEPS, PROMPTS = 30, 32


def main() -> float:
    """Train the actor, and return the mean score of what the rollout generates with its weights."""
    ray.init("local", num_cpus=4, object_store_memory=200_000_000)
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2)  # two slots in each bundle
    settings = {"ppo_micro_batch_size": PROMPTS}
    layouts = {"actor": actor_config(parallel={"tp": 2}, **settings), "rollout": actor_config(**settings)}
    actor, rollout = (
        MegatronRayWorkerGroup(
            pool, RayClassWithInitArgs(ActorRolloutRefWorker, config, role=role), name_prefix=role, timeout=300
        )
        for role, config in layouts.items()
    )
    for group in (actor, rollout):
        print(group.topology.describe(), end="\n\n")
        group.init_model()
    with actor, rollout, WeightTransfer(actor, rollout) as transfer:
        print(transfer.explain())
        for step in range(STEPS):
            prompts = problems(PROMPTS, seed=step)
            actor.update_sft(supervised_rows(responses(prompts, right_answers(prompts))))
        report = transfer.run()
        print(f"{report.bytes_sent} bytes by {report.transport} in {report.seconds:.3f} s")
        score = float(scores(rollout.generate_sequences(problems(PROMPTS, seed=1000))).mean())
    print(f"score of the rollout: {score:.2f}")
    ray.shutdown()
    return score


if __name__ == "__main__":
    main()
