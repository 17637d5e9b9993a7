"""Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290): a policy from pairs, without a reward.

The loss of a pair of responses is ``-log sigmoid(margin)``, with ``margin = r(chosen) - r(rejected)`` and the implicit
reward ``r = beta * (log policy - log reference)`` of a response. Its gradient (section 4) is
``-beta * sigmoid(-margin) * (grad log policy(chosen) - grad log policy(rejected))``: each step computes the weights
with the present policy, and trains the log-probabilities of all responses with them.

python -m examples.loops.dpo
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from examples.loops.task import DIGITS, FIRST_DIGIT, LENGTH, actor_config, local, problems, responses, right_answers
from mcontroller import DataProto

START = local  # on Ray: on_ray of examples.loops.task
STEPS, PAIRS, BETA = 30, 64, 0.5


def pairs() -> DataProto:
    """Return the chosen responses, and then as many rejected ones."""
    prompts = problems(PAIRS, seed=0)
    drawn = torch.randint(DIGITS, (PAIRS, LENGTH), generator=torch.Generator().manual_seed(1)) + FIRST_DIGIT
    return DataProto.concat([responses(prompts, right_answers(prompts)), responses(prompts, drawn)])


def main() -> list[float]:
    """Train, and return the loss of every step."""
    config = actor_config(
        policy_loss="gpg",  # -advantage * log policy, summed over the tokens of a response
        loss_agg_mode="seq-mean-token-sum",
        ppo_mini_batch_size=2 * PAIRS,
        ppo_micro_batch_size=2 * PAIRS,
    )
    policy = START(config, "actor_ref")
    policy.init_model()
    batch = pairs()
    reference = policy.compute_ref_log_prob(batch).batch["ref_log_prob"]
    found = []
    for step in range(STEPS):
        log_probs = policy.compute_log_prob(batch).batch["old_log_probs"]
        chosen, rejected = (BETA * (log_probs - reference)).sum(1).split(PAIRS)
        margin = chosen - rejected
        found.append(-float(logsigmoid(margin).mean()))

        weight = 2 * BETA * torch.sigmoid(-margin)  # 2: the loss averages over responses, of which a pair has two
        advantages = torch.cat((weight, -weight))[:, None].repeat(1, LENGTH)
        policy.update_actor(batch.union(DataProto.from_dict({"advantages": advantages})))
        print(f"step {step}: loss {found[-1]:.3f}, chosen above rejected {float((margin > 0).float().mean()):.2f}")
    return found


if __name__ == "__main__":
    main()
