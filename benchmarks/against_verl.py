"""Compare estimators, losses, averages and KL estimates with verl 0.4.1 and TRL 0.22, on random data.

    PYTHONPATH=. PEER_PYTHON benchmarks/against_verl.py

``PEER_PYTHON`` is the interpreter of an environment with the project's requirements and, without their own::

    pip install --no-deps verl==0.4.1 trl==0.22.2
    pip install accelerate datasets codetiming hydra-core 'setuptools<81'

Prints a line for each comparison: the largest absolute difference, and the largest absolute value. Exits with 1 if two
definitions that docs/algorithms.md calls equal differ by more than 1e-5. Definitions that differ are listed with the
reason; there the difference must be more than 1e-3, so that the list stays true.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos as verl

from mcontroller.data.batch import DataProto
from trainer import GAEOptions, GRPOOptions, ReinforcePlusPlusBaselineOptions, compute_advantage
from workers.losses.kl import estimate_kl
from workers.losses.registry import AGGREGATIONS, POLICY_LOSSES

TOLERANCE = 1e-5
ROWS, GROUP, WIDTH = 24, 4, 12
Comparison = tuple[str, Tensor, Tensor, str]
"""Name, values of this project, values of the other, and the reason why they differ; empty if they must be equal."""


def batch() -> dict[str, Tensor]:
    """Return random columns ``[rows, response]`` with responses of 1 to ``WIDTH`` tokens."""
    torch.manual_seed(0)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,))
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    scores = torch.zeros(ROWS, WIDTH)
    scores[torch.arange(ROWS), lengths - 1] = torch.randn(ROWS)
    scores[:GROUP] = 0.0
    return {
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "values": torch.randn(ROWS, WIDTH) * mask,  # verl 0.4.1 reads the values of padding
        "greedy_scores": torch.randn(ROWS),
    }


def estimators() -> Iterator[Comparison]:
    """Yield the comparisons of advantages with verl."""
    columns = batch()
    uid = np.repeat(np.arange(ROWS // GROUP), GROUP).astype(object)
    data = DataProto.from_dict(columns, {"uid": uid})
    mask, rewards, greedy = (columns[name] for name in ("response_mask", "token_level_rewards", "greedy_scores"))

    def ours(name: str, gamma: float = 1.0, lam: float = 1.0, options: Any = None) -> Tensor:
        return compute_advantage(data, name, gamma, lam, options).batch["advantages"]

    peer = verl.compute_gae_advantage_return(rewards, columns["values"], mask, 0.99, 0.95)[0] * mask
    yield "gae", ours("gae", 0.99, 0.95), peer, "verl whitens with a variance over tokens - 1"
    correction = ((mask.sum() - 1) / mask.sum()).sqrt()
    yield "gae x sqrt((tokens - 1) / tokens)", ours("gae", 0.99, 0.95, GAEOptions()) * correction, peer, ""
    peer = verl.compute_grpo_outcome_advantage(rewards, mask, uid)[0]
    yield "grpo", ours("grpo"), peer, "verl divides the variance by n - 1"
    yield "grpo, ddof=1", ours("grpo", options=GRPOOptions(ddof=1)), peer, ""
    peer = verl.compute_grpo_outcome_advantage(rewards, mask, uid, norm_adv_by_std_in_grpo=False)[0]
    yield "grpo, scale=none", ours("grpo", options=GRPOOptions(scale="none")), peer, ""
    yield "rloo", ours("rloo"), verl.compute_rloo_outcome_advantage(rewards, mask, uid)[0], ""
    yield "opo", ours("opo"), verl.compute_opo_outcome_advantage(rewards, mask, uid)[0], ""
    yield "remax", ours("remax"), verl.compute_remax_outcome_advantage(rewards, greedy, mask)[0], ""
    config = SimpleNamespace(gamma=0.9)
    peer = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)[0]
    yield "reinforce_plus_plus x correction", ours("reinforce_plus_plus", 0.9) * correction, peer, ""
    peer = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, uid)[0]
    options = ReinforcePlusPlusBaselineOptions(normalize=False)
    yield (
        "reinforce_plus_plus_baseline",
        ours("reinforce_plus_plus_baseline"),
        peer,
        "verl whitens over tokens, which moves groups of equal scores away from 0",
    )
    whitened = verl.verl_F.masked_whiten(ours("reinforce_plus_plus_baseline", options=options), mask) * mask
    yield "reinforce_plus_plus_baseline, normalize=false, then whitened", whitened, peer, ""


def _loss(
    name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, mode: str, **limits: Any
) -> Tensor:
    chosen = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None} | limits
    per_token = POLICY_LOSSES[name].function(log_probs, old, advantages, mask.float(), **chosen).loss
    weights = AGGREGATIONS[mode](mask.float(), mask.float(), WIDTH)
    loss = (per_token * weights.tokens).sum() / weights.count
    return torch.cat((loss.detach()[None], torch.autograd.grad(loss, log_probs)[0].flatten()))


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = batch()["response_mask"]
    log_probs = (-torch.rand(ROWS, WIDTH) * 3).requires_grad_()
    old = log_probs.detach() + 0.4 * torch.randn(ROWS, WIDTH)
    return log_probs, old, torch.randn(ROWS, 1).expand(ROWS, WIDTH).contiguous(), mask


def losses_of_verl() -> Iterator[Comparison]:
    """Yield the comparisons of the clipped loss, its averages and their gradients with verl."""
    log_probs, old, advantages, mask = _inputs()
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        loss = verl.compute_policy_loss(old, log_probs, advantages, mask, 0.2, 0.2, 0.28, 3.0, mode)[0]
        peer = torch.cat((loss.detach()[None], torch.autograd.grad(loss, log_probs)[0].flatten()))
        mine = _loss("ppo", log_probs, old, advantages, mask, mode, dual_clip=3.0)
        if mode.endswith("norm"):
            yield f"ppo, {mode}", mine, peer, "verl does not divide by the responses"
            mine = mine * ROWS
        yield f"ppo, dual clip, clip-higher, {mode}{' x rows' * mode.endswith('norm')}", mine, peer, ""


def losses_of_trl() -> Iterator[Comparison]:
    """Yield the comparisons of losses and gradients with ``GRPOTrainer._compute_loss`` of TRL."""
    checks = vars(importlib.import_module("trl.import_utils"))
    for name, value in checks.items():  # newer versions of transformers return (available, version)
        checks[name] = value[0] if name.endswith("_available") and isinstance(value, tuple) else value

    from trl.trainer.grpo_trainer import GRPOTrainer

    log_probs, old, advantages, mask = _inputs()

    def peer(loss_type: str, level: str, low: float, high: float) -> Tensor:
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs)),
            top_entropy_quantile=1.0,
            beta=0.0,
            importance_sampling_level=level,
            epsilon_low=low,
            epsilon_high=high,
            args=SimpleNamespace(delta=None),
            loss_type=loss_type,
            current_gradient_accumulation_steps=1,
            max_completion_length=WIDTH,
            accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value),
            model=SimpleNamespace(training=True),
            _metrics={"train": _Lists()},
        )
        inputs = {"prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask}
        inputs |= {"advantages": advantages[:, 0], "old_per_token_logps": old, "num_items_in_batch": mask.sum()}
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        return torch.cat((loss.detach()[None], torch.autograd.grad(loss, log_probs)[0].flatten()))

    for loss_type, mode in (
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ):
        mine = _loss("ppo", log_probs, old, advantages, mask, mode)
        yield f"TRL {loss_type}: ppo, {mode}", mine, peer(loss_type, "token", 0.2, 0.28), ""
    limits = {"clip_low": 0.05, "clip_high": 0.06}
    mine = _loss("gspo", log_probs, old, advantages, mask, "seq-mean-token-mean", **limits)
    yield "TRL grpo with sequence ratios: gspo", mine, peer("grpo", "sequence", 0.05, 0.06), ""


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def kl_estimates() -> Iterator[Comparison]:
    """Yield the comparisons of KL estimates with verl."""
    policy, reference = -torch.rand(1000) * 4, -torch.rand(1000) * 4
    for name in ("k1", "k2", "k3", "abs"):
        yield (
            f"KL {name}",
            estimate_kl(policy, reference, name),
            verl.kl_penalty(policy, reference, name),
            ("verl limits k3 to 10" if name == "k3" else ""),
        )
    mine = estimate_kl(policy, reference, "k3").clamp(max=10)
    yield "KL k3, limited to 10", mine, verl.kl_penalty(policy, reference, "k3"), ""


def main() -> int:
    """Print all comparisons, and return 1 if one is not as documented."""
    groups: list[Callable[[], Iterator[Comparison]]] = [estimators, losses_of_verl, losses_of_trl, kl_estimates]
    failures = 0
    for name, mine, peer, reason in (comparison for group in groups for comparison in group()):
        difference = float((mine - peer).abs().max())
        holds = difference > 1e-3 if reason else difference < TOLERANCE
        failures += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {difference:9.2e} of {float(peer.abs().max()):7.3f}  {name}  {reason}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
