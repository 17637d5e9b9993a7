"""Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290): a policy from pairs, without a reward.

The loss of a pair of responses is ``-log sigmoid(margin)``, with ``margin = r(chosen) - r(rejected)`` and the implicit
reward ``r = beta * (log policy - log reference)`` of a response.

python -m examples.loops.dpo
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from examples.loops.task import DIGITS, FIRST_DIGIT, LENGTH, actor_config, local, problems, responses, right_answers
from mcontroller import DataProto
from workers import Rule, TokenBatch, TokenLoss, masked_sum

START = local  # on Ray: on_ray of examples.loops.task
STEPS, PAIRS, BETA = 30, 64, 0.5


def pairs() -> DataProto:
    """Return pairs of responses as consecutive rows, the chosen one first, which stay in one micro-batch."""
    prompts = problems(PAIRS, seed=0)
    drawn = torch.randint(DIGITS, (PAIRS, LENGTH), generator=torch.Generator().manual_seed(1)) + FIRST_DIGIT
    both = DataProto.concat([responses(prompts, right_answers(prompts)), responses(prompts, drawn)])
    both = both.select_idxs(torch.arange(2 * PAIRS).view(2, PAIRS).T.flatten())
    both.meta_info["rows_together"] = 2
    return both


def loss_of_pairs(rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss summed over the pairs of a micro-batch, their number, and how often the chosen one is above."""
    rewards = BETA * ((output[0] - rows.columns["ref_log_prob"]) * rows.mask).sum(1)
    chosen, rejected = rewards.view(-1, 2).T
    counted = rows.mask.view(len(chosen), -1).amax(1)  # 0 for pairs that only fill the micro-batch
    right = masked_sum((chosen > rejected).float(), counted)
    return masked_sum(-logsigmoid(chosen - rejected), counted), counted.sum(), {"right": right}


DPO = TokenLoss("dpo", loss_of_pairs, columns=("ref_log_prob",), metrics={"right": Rule.LOSS_MEAN})


def main() -> list[float]:
    """Train, and return the loss of every step."""
    policy = START(actor_config(ppo_micro_batch_size=PAIRS // 2), "actor_ref")
    policy.init_model()
    batch = pairs()
    batch = batch.union(policy.compute_ref_log_prob(batch))
    history = []
    for step in range(STEPS):
        metrics = policy.forward_backward(batch, loss=DPO).meta_info["metrics"]
        policy.optim_step()
        history.append(metrics["dpo/loss"][0])
        print(f"step {step}: loss {history[-1]:.3f}, chosen above rejected {metrics['dpo/right'][0]:.2f}")
    return history


if __name__ == "__main__":
    main()
