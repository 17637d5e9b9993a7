"""GRPO (Shao et al., 2024, arXiv:2402.03300, algorithm 1): groups of responses, scored relative to each other.

python -m examples.loops.grpo
"""

from __future__ import annotations

import numpy as np

from examples.loops.task import actor_config, local, problems, scores
from mcontroller import DataProto
from trainer import compute_advantage, outcome_scores

START = local  # on Ray: on_ray of examples.loops.task
STEPS, PROMPTS, GROUP = 60, 16, 8


def main() -> list[float]:
    """Train, and return the mean score of the responses of every step."""
    config = actor_config(
        rollout={"n": GROUP},
        ppo_mini_batch_size=PROMPTS * GROUP,
        ppo_micro_batch_size=PROMPTS * GROUP,
        use_kl_loss=True,  # beta * KL(policy || reference), in the loss as in equation 3
        kl_loss_coef=0.001,
    )
    policy = START(config, "actor_rollout_ref")
    policy.init_model()
    history = []
    for step in range(STEPS):
        batch = policy.generate_sequences(problems(PROMPTS, seed=step))
        rewards = scores(batch)
        history.append(float(rewards.mean()))

        token_rewards = outcome_scores(rewards, batch.batch["response_mask"])
        uid = np.arange(PROMPTS).repeat(GROUP)  # responses to one prompt are neighbors
        batch = batch.union(DataProto.from_dict({"token_level_rewards": token_rewards}, {"uid": uid}))
        batch = compute_advantage(batch, "grpo")  # (score - mean of the group) / deviation of the group

        batch = batch.union(policy.compute_ref_log_prob(batch))
        metrics = policy.update_actor(batch.select(non_tensor_batch_keys=[])).meta_info["metrics"]
        print(f"step {step}: score {history[-1]:.3f}, KL {np.mean(metrics['actor/kl_loss']):.4f}")
    return history


if __name__ == "__main__":
    main()
