"""Verify after an update of weights that the engine holds the policy's weights: all of them, and the new ones.

A tolerance on log-probabilities cannot do this. One update in bfloat16 at a learning rate of 1e-6 changes them by less
than engine and policy differ anyway. Fingerprints of the tensors are equal or not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mcontroller.errors import ConfigError
from parallel_state.agreement import all_gather_values
from workers.config.rollout import RolloutConfig
from workers.generate.canary_check import CanaryCheck
from workers.generate.rollout_protocol import HeldWeights, PolicyWeights, ReadableRollout, Rollout
from workers.weights.fingerprints import Fingerprint, model_fingerprints, part_fingerprints
from workers.weights.hf.model import hf_parts
from workers.weights.not_arrived import WeightsNotArrived

__all__ = ["ArrivalCheck", "WeightsNotArrived"]

logger = logging.getLogger(__name__)

_ABSENT = torch.iinfo(torch.int64).min
_Key = tuple[str, str]  # name and dtype
_Dtypes = Mapping[str, Collection[str]]


class _Plan(NamedTuple):
    """The tensors that are compared, the same on every rank.

    Attributes:
        naming: that of the engine.
        dtypes: by name, the dtypes in which the engines of all ranks hold the tensor.
        slots: the position of each tensor and dtype in the vectors that are exchanged.
        held: the keys that this rank's engine reported.
    """

    naming: str
    dtypes: _Dtypes
    slots: dict[_Key, int]
    held: frozenset[_Key]


class ArrivalCheck:
    """The comparison of the engine's weights with the policy's, after every update.

    Args:
        config: ``verify_weights`` decides whether and how.
        rollout: the engine.
        canaries: what compares engines by their log-probabilities.

    Raises:
        ConfigError: ``verify_weights`` is ``fingerprints``, and the engine does not report any.
    """

    def __init__(self, config: RolloutConfig, rollout: Rollout, canaries: CanaryCheck | None = None) -> None:
        self._on = config.verify_weights != "never"
        wanted = config.verify_weights == "canaries" or not isinstance(rollout, ReadableRollout)
        self._canaries = canaries if self._on and wanted and config.verify_weights != "fingerprints" else None
        self._plan: _Plan | None = None
        self._before: list[int] = []
        if not rollout.holds_weights:
            return
        engine = type(rollout).__name__
        if not self._on:
            logger.warning("the weights of %s are not verified: %s", engine, config.unverified_reason)
        elif self._canaries is None and not isinstance(rollout, ReadableRollout):
            text = f"{engine} has no method fingerprints (see workers.generate.rollout_protocol.ReadableRollout)"
            if config.verify_weights == "fingerprints":
                raise ConfigError(
                    f"rollout.verify_weights is 'fingerprints', and {text}",
                    key="rollout.verify_weights",
                    value=config.verify_weights,
                )
            logger.warning("the weights of the rollout are not verified after an update: %s", text)

    def update(self, rollout: Rollout, weights: PolicyWeights, update: int, *, loaded: bool) -> Mapping[str, float]:
        """Update the weights of the engine, and verify that they have arrived (a collective over all ranks).

        Args:
            rollout: the engine.
            weights: the weights that it is to have.
            update: the number of the update, for the error.
            loaded: whether the engine has weights of an earlier update.

        Returns:
            What the update and ``verify`` return.

        Raises:
            WeightsNotArrived: on every rank.
        """
        if loaded and self._canaries is not None and rollout.holds_weights:
            self._canaries.read_prompts(rollout)
        metrics = rollout.update_weights(weights)
        return {**metrics, **self.verify(rollout, weights, update)}

    def verify(self, rollout: Rollout, weights: PolicyWeights, update: int) -> Mapping[str, float]:
        """Compare the engine with the policy, by fingerprints or canaries (a collective over all ranks).

        An engine without a copy of the weights is not compared.

        Args:
            rollout: the engine, after ``update_weights``.
            weights: the weights that it was updated with.
            update: the number of the update, for the error.

        Returns:
            ``verify_seconds``: those of the slowest rank, and those of ``CanaryCheck.verify``; nothing if nothing was
            compared.

        Raises:
            WeightsNotArrived: on every rank.
        """
        if self._canaries is not None and rollout.holds_weights:
            return self._canaries.verify(rollout, update)
        if not self._on or not rollout.holds_weights or not isinstance(rollout, ReadableRollout):
            return {}
        start = time.perf_counter()
        held = rollout.fingerprints()
        device = next(weights.chunks[0].parameters()).device
        plan = self._planned(held, weights, device)
        policy = _POLICY[plan.naming](weights, plan.dtypes)
        nanoseconds = int((time.perf_counter() - start) * 1e9)
        values, (slowest, stale) = _exchanged(plan.slots, policy, held, nanoseconds, device)
        self._check(plan, held, values, stale, update)
        self._before = [lowest for (lowest, _), _ in values]
        return {"verify_seconds": slowest / 1e9}

    def _planned(self, held: HeldWeights, weights: PolicyWeights, device: torch.device) -> _Plan:
        """The plan of the update before, or a new one if an engine reports other tensors."""
        keys = frozenset((each.name, each.dtype) for each in held.fingerprints)
        plan = self._plan
        changed = torch.tensor(int(plan is None or keys != plan.held), device=device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX)
        if plan is None or int(changed):
            plan = self._plan = _plan(held, keys, weights)
            self._before = []
        return plan

    def _check(self, plan: _Plan, held: HeldWeights, values: Sequence[_Values], stale: int, update: int) -> None:
        differing: dict[str, tuple[list[int], list[int]]] = {}
        old, missing, unknown = set(), [], []
        for (name, _), slot in plan.slots.items():
            policy, engine = values[slot]
            if policy[0] == _ABSENT:
                unknown.append(name)
            elif engine[0] == _ABSENT:
                missing.append(name)
            elif not set(engine) <= set(policy):
                differing[name] = sorted(set(policy)), sorted(set(engine))
                if self._before and set(engine) <= {*policy, self._before[slot]}:
                    old.add(name)
            elif policy[0] != policy[1]:
                logger.warning("update %d: ranks of the policy hold different values of %s", update, name)
        if differing or missing or unknown or stale:
            mine = any(each.value not in differing.get(each.name, ([each.value],))[0] for each in held.fingerprints)
            mine = mine or held.stale_tokens > 0
            ranks = [rank for rank, differs in enumerate(all_gather_values(mine)) if differs]
            raise WeightsNotArrived.of_tensors(
                update,
                len(plan.slots),
                tensors=differing,
                old=sorted(old),
                missing=missing,
                unknown=unknown,
                ranks=ranks,
                stale_tokens=stale,
            )


_Bounds = tuple[int, int]  # the lowest and the highest value of all ranks and copies
_Values = tuple[_Bounds, _Bounds]  # of the policy, of the engine


def _hf_fingerprints(weights: PolicyWeights, dtypes: _Dtypes) -> list[Fingerprint]:
    return part_fingerprints(hf_parts(weights.chunks, weights.context), dtypes)


def _megatron_fingerprints(weights: PolicyWeights, dtypes: _Dtypes) -> list[Fingerprint]:
    return model_fingerprints(weights.chunks, weights.context, dtypes)


_POLICY: dict[str, Callable[[PolicyWeights, _Dtypes], list[Fingerprint]]] = {
    "hugging_face": _hf_fingerprints,
    "megatron": _megatron_fingerprints,
}


def _plan(held: HeldWeights, keys: frozenset[_Key], weights: PolicyWeights) -> _Plan:
    everyone = all_gather_values((held.naming, sorted(keys)))
    namings = sorted({naming for naming, _ in everyone})
    if len(namings) > 1 or namings[0] not in _POLICY:
        raise ConfigError(
            f"the engine's fingerprints have the naming {' and '.join(map(repr, namings))}; expected one of "
            f"{', '.join(_POLICY)}, the same on all ranks",
            key="naming",
            value=namings,
        )
    dtypes: dict[str, set[str]] = {}
    for _, theirs in everyone:
        for name, dtype in theirs:
            dtypes.setdefault(name, set()).add(dtype)
    policy = [(each.name, each.dtype) for each in _POLICY[namings[0]](weights, dtypes)]
    held_keys = [key for _, theirs in everyone for key in theirs]
    policy_keys = [key for theirs in all_gather_values(policy) for key in theirs]
    slots = {key: slot for slot, key in enumerate(dict.fromkeys([*policy_keys, *held_keys]))}
    return _Plan(namings[0], dtypes, slots, keys)


def _exchanged(
    slots: Mapping[_Key, int],
    policy: Sequence[Fingerprint],
    held: HeldWeights,
    nanoseconds: int,
    device: torch.device,
) -> tuple[list[_Values], tuple[int, int]]:
    """Return the values of all ranks by slot, and the largest ``nanoseconds`` and ``stale_tokens``.

    It is one reduction of 32 bytes per tensor.
    """
    vectors: list[list[int]] = []
    for fingerprints in (policy, held.fingerprints):
        highest, lowest = ([_ABSENT] * len(slots) for _ in range(2))
        for name, dtype, value in fingerprints:
            slot = slots[name, dtype]
            highest[slot] = max(highest[slot], value)
            lowest[slot] = max(lowest[slot], ~value)  # the largest complement is that of the smallest value
        vectors += [highest, lowest]
    of_rank = [nanoseconds, held.stale_tokens]
    flat = torch.tensor([value for vector in vectors for value in vector] + of_rank, device=device)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    *reduced, slowest, stale = flat.tolist()
    parts = [reduced[start : start + len(slots)] for start in range(0, len(reduced), len(slots))]

    def bounds(highest: int, lowest: int) -> _Bounds:
        return (_ABSENT, _ABSENT) if highest == lowest == _ABSENT else (~lowest, highest)

    return [(bounds(*each[:2]), bounds(*each[2:])) for each in zip(*parts, strict=True)], (slowest, stale)
