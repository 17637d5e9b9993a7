"""Responses of several turns on real ranks: log-probabilities of the policy's tokens, and gradients of these alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.testing import SimulatedGroupMaker
from parallel_state.layout import ParallelLayout
from tests.workers.roles import MODEL, OPTIM, PROMPT, SAMPLED, prompts
from trainer.rollout.episodes import Episodes
from trainer.rollout.trajectory import Trajectory
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

REPLY = [58, 59, 60]
LONGEST, ROWS, SAMPLES = 16, 5, 2


async def many_calls(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
    """Two thirds of the vocabulary end a turn, so that most responses have several."""
    made = await rollout.submit(problem["prompt_ids"], stop_token_ids=range(20, 60))
    while made.ended == "turn" and made.turns < 4 and len(made.tokens) + len(REPLY) < LONGEST:
        made.replied(REPLY)
        made = await rollout.submit(made, stop_token_ids=range(20, 60))
    return made


def a_group(
    simulated_group: SimulatedGroupMaker, layout: ParallelLayout, parallel: dict[str, int], **changes: Any
) -> Any:
    config = {
        "model": MODEL,
        "optim": OPTIM,
        "parallel": parallel,
        "rollout": {"prompt_length": PROMPT, "response_length": LONGEST, "n": SAMPLES, "seed": 3},
        "ppo_mini_batch_size": ROWS * SAMPLES,
        "ppo_micro_batch_size": 2,
        "entropy_coeff": 0.1,
    }
    group = simulated_group(ActorRolloutRefWorker, layout, load_config(ActorConfig, config, changes), "actor_rollout")
    group.init_model()
    return group


def responses_of(group: Any) -> DataProto:
    return Episodes(many_calls, processes=0)(prompts(ROWS, SAMPLED), group.generate_sequences)


def test_log_probs_of_the_policys_tokens_are_those_of_the_whole_sequence(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(4, tp=2, pp=1), {"tp": 2})
    batch = responses_of(group)
    mask = batch.batch["response_mask"].bool()
    inside = batch.batch["attention_mask"][:, PROMPT:].bool()
    replies = inside & ~mask
    assert len(batch) == ROWS * SAMPLES and int((replies.sum(1) >= 2 * len(REPLY)).sum()) >= ROWS  # several turns
    assert batch.batch["responses"][replies].view(-1, len(REPLY)).tolist() == [REPLY] * (int(replies.sum()) // 3)
    scored = group.compute_log_prob(batch).batch["old_log_probs"]
    sampled = batch.batch["rollout_log_probs"]
    torch.testing.assert_close(sampled[mask], scored[mask], atol=1e-4, rtol=0)
    assert sampled[mask].abs().max() > 1
    assert not sampled[~mask].any() and not scored[~mask].any()
    alone = responses_of(a_group(simulated_group, ParallelLayout(1), {}))
    assert torch.equal(alone.batch["responses"], batch.batch["responses"])
    assert torch.equal(alone.batch["response_mask"], batch.batch["response_mask"])


def test_the_tokens_of_replies_are_no_targets_of_the_loss(simulated_group: SimulatedGroupMaker) -> None:
    group = a_group(simulated_group, ParallelLayout(1), {})
    batch = responses_of(group)
    mask, inside = batch.batch["response_mask"], batch.batch["attention_mask"][:, PROMPT:]
    generator = torch.Generator().manual_seed(4)
    advantages = torch.randn(mask.shape, generator=generator)
    old = batch.batch["rollout_log_probs"] + 0.1 * torch.randn(mask.shape, generator=generator)

    def gradients(noise: float, mask: Tensor) -> list[Tensor]:
        holes = (inside - batch.batch["response_mask"]) * noise
        columns = {**batch.tensors(), "response_mask": mask}
        columns |= {"advantages": advantages + holes, "old_log_probs": old - holes}
        group.forward_backward(DataProto.from_dict(columns, meta_info={"temperature": 1.0}))
        return [parameter.main_grad.clone() for parameter in group.workers[0].model[0].parameters()]

    plain, noisy, all_targets = gradients(0.0, mask), gradients(3.0, mask), gradients(0.0, inside)
    assert all(torch.equal(*pair) for pair in zip(plain, noisy, strict=True))
    assert max(float((one - other).abs().max()) for one, other in zip(plain, all_targets, strict=True)) > 1e-3


def test_experts_of_all_turns_are_recorded(simulated_group: SimulatedGroupMaker) -> None:
    """They equal a pass over the whole responses, apart from the tokens after the last one that was fed."""
    experts = {"model": {"num_moe_experts": 8, "moe_ffn_hidden_size": 32}}
    group = a_group(simulated_group, ParallelLayout(2, pp=2), {"pp": 2}, router_replay="rollout", **experts)
    batch = responses_of(group)
    scoring = a_group(simulated_group, ParallelLayout(1), {}, router_replay="old_log_probs", **experts)
    whole = scoring.compute_log_prob(batch).batch["routed_experts"]
    recorded = batch.batch["routed_experts"]
    known, inside = (recorded != -1).all(-1).all(-1), batch.batch["attention_mask"] != 0
    assert whole.shape == recorded.shape and whole.dtype == recorded.dtype
    assert torch.equal(recorded[known].sort(-1).values, whole[known].sort(-1).values)
    sampled = torch.cat((torch.zeros(len(batch), PROMPT), batch.batch["response_mask"]), 1)
    last = sampled.shape[1] - 1 - sampled.flip(1).argmax(1)  # the last token that the policy sampled
    assert torch.equal(known, inside & (torch.arange(sampled.shape[1]) < last[:, None]))
    assert int((sampled[:, PROMPT:].diff(dim=1) == 1).sum()) >= ROWS  # turns after the first
    replayed = group.compute_log_prob(batch).batch["old_log_probs"]
    mask = batch.batch["response_mask"].bool()
    torch.testing.assert_close(replayed[mask], batch.batch["rollout_log_probs"][mask], atol=1e-4, rtol=0)
