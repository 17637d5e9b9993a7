"""Best-of-n fine-tuning (RAFT: Dong et al., 2023, arXiv:2304.06767): imitate the best of one's own responses.

python -m examples.loops.best_of_n
"""

from __future__ import annotations

import torch

from examples.loops.task import actor_config, local, problems, scores
from trainer import supervised_rows

START = local  # on Ray: on_ray of examples.loops.task
STEPS, PROMPTS, N = 40, 32, 8


def main() -> list[float]:
    """Train, and return the mean score of all responses of every step."""
    config = actor_config(rollout={"n": N}, ppo_micro_batch_size=PROMPTS)
    policy = START(config, "actor_rollout")
    policy.init_model()
    history = []
    for step in range(STEPS):
        batch = policy.generate_sequences(problems(PROMPTS, seed=step))
        rewards = scores(batch)
        history.append(float(rewards.mean()))

        best = torch.arange(PROMPTS) * N + rewards.view(PROMPTS, N).argmax(1)
        metrics = policy.update_sft(supervised_rows(batch.select_idxs(best))).meta_info["metrics"]
        loss = torch.tensor(metrics["sft/loss"]).mean()
        print(f"step {step}: score {history[-1]:.3f}, of the best {float(rewards[best].mean()):.3f}, loss {loss:.3f}")
    return history


if __name__ == "__main__":
    main()
