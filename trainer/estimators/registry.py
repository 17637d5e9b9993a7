"""Advantage estimators by name, and ``compute_advantage``.

Register a custom one before the configuration is made, and choose it with ``algorithm.adv_estimator=mine``. Estimators
run in the controller's process, so a registration in the program's main file is enough::

    @dataclass(frozen=True)
    class MyOptions:
        scale: float = 1.0

    @register_advantage_estimator("mine", options=MyOptions)
    def mine(data, *, gamma, lam, options):
        (rewards,) = columns(data, "token_level_rewards")
        return options.scale * rewards, rewards
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError, DataError
from parallel_state.lazy import Lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mcontroller.data.batch import DataProto
    from trainer.columns import columns
else:
    torch = Lazy("torch")
    DataProto, columns = Lazy("mcontroller.data.batch", "DataProto"), Lazy("trainer.columns", "columns")

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", key="algorithm.adv_estimator")
"""Advantage estimators by the name that ``algorithm.adv_estimator`` takes."""
F = TypeVar("F", bound=Callable[..., "tuple[Tensor, Tensor]"])


class KLInReward(Enum):
    """Whether a KL penalty may be part of the reward that an estimator reads."""

    DEFAULT = "on by default"
    ALLOWED = "off by default"
    REJECTED = "rejected"


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator.

    Attributes:
        estimate: its function.
        needs_critic: whether it reads ``values``. Without it no critic is started.
        needs_group: whether it compares responses to the same prompt, so that one response per prompt has no signal.
        needs_greedy: whether it reads ``greedy_scores``, the score of the greedy response to each prompt.
        kl_in_reward: whether a KL penalty may be part of the reward.
        options: class of its options, a dataclass; None if it has none.
        reads: of ``gamma`` and ``lam``, those that it reads without a KL penalty in the reward.
    """

    estimate: Callable[..., tuple[Tensor, Tensor]]
    needs_critic: bool = False
    needs_group: bool = False
    needs_greedy: bool = False
    kl_in_reward: KLInReward = KLInReward.ALLOWED
    options: type | None = None
    reads: tuple[str, ...] = ("gamma", "lam")


def register_advantage_estimator(
    name: str,
    *,
    needs_critic: bool = False,
    needs_group: bool = False,
    needs_greedy: bool = False,
    kl_in_reward: KLInReward | None = None,
    options: type | None = None,
    reads: tuple[str, ...] = ("gamma", "lam"),
) -> Callable[[F], F]:
    """Return a decorator that registers an advantage estimator under ``name``.

    The function gets a scored batch ``data`` with ``token_level_scores``, ``token_level_rewards`` (the scores minus the
    KL penalty in the reward, if there is one) and ``response_mask`` ``[rows, response]``, and the keyword arguments
    ``gamma`` and ``lam``. Responses without a score are not in the batch, so that groups can have different sizes. It
    returns advantages and returns, both float32 ``[rows, response]``, 0 for tokens with a mask of 0.

    Args:
        name: the value of ``algorithm.adv_estimator`` that chooses it.
        needs_critic: whether it reads the critic's ``values``.
        needs_group: whether it compares responses to the same prompt; ``rollout.n=1`` is rejected then.
        needs_greedy: whether it reads ``greedy_scores``, float32 ``[rows]``: the score of the greedy response to the
            same prompt. The trainer generates it only if this is set.
        kl_in_reward: whether a KL penalty may be part of the reward. None: on by default with a critic, otherwise off
            by default.
        options: class of its options, a dataclass. The function gets an instance as ``options``; its fields are set
            with ``algorithm.custom``.
        reads: of ``gamma`` and ``lam``, those that it reads without a KL penalty in the reward; others are rejected.

    Raises:
        ConfigError: another advantage estimator is registered under this name.
    """
    kl = kl_in_reward or (KLInReward.DEFAULT if needs_critic else KLInReward.ALLOWED)

    def add(estimate: F) -> F:
        entry = AdvantageEstimator(estimate, needs_critic, needs_group, needs_greedy, kl, options, reads)
        ADVANTAGE_ESTIMATORS.add(name, entry)
        return estimate

    return add


def compute_advantage(
    data: DataProto,
    adv_estimator: str = "gae",
    gamma: float = 1.0,
    lam: float = 1.0,
    options: Any = None,
) -> DataProto:
    """Return the batch with columns ``advantages`` and ``returns``, float32 ``[rows, response]``.

    The estimator gets the rows that have response tokens: one whose ``response_mask`` is 0 is in no baseline and in no
    statistic over the batch, and its advantages and returns are 0.

    Args:
        data: ``token_level_rewards`` and ``response_mask`` ``[rows, response]``, ``token_level_scores`` if the rewards
            contain a KL penalty, and the columns that the estimator reads: ``values`` for gae, ``greedy_scores`` for
            remax, the non-tensor column ``uid`` for those that compare responses to the same prompt.
        adv_estimator: a name in ``ADVANTAGE_ESTIMATORS``.
        gamma: discount factor per token.
        lam: lambda of generalized advantage estimation.
        options: the options of the estimator, such as ``GRPOOptions(scale="none")``; None for its defaults.

    Raises:
        ConfigError: no estimator has this name, or it has other options.
        DataError: a column is missing; a reward of a token that counts is not finite; or all responses are to
            different prompts, and the estimator compares those to the same one.
    """
    estimator = ADVANTAGE_ESTIMATORS.get_or_raise(adv_estimator)
    chosen: dict[str, Any] = {}
    if estimator.options is not None:
        chosen["options"] = estimator.options() if options is None else options
    if options is not None and not isinstance(options, estimator.options or ()):
        expected = estimator.options.__name__ if estimator.options else "None"
        raise ConfigError(
            f"adv_estimator {adv_estimator!r} was passed options of type {type(options).__name__}; expected {expected}",
            key="options",
            value=options,
        )
    (mask,) = columns(data, "response_mask")
    rows = mask.any(1).nonzero().flatten()
    _check_rewards(data, mask)
    uids = data.non_tensor_batch.get("uid", ())
    if estimator.needs_group and len(set(uids)) == len(uids) > 0:
        raise DataError(
            f"{adv_estimator} compares the responses to one prompt, which have the same uid; the {len(uids)} rows have "
            "different ones, so that every advantage would be 0: give the responses to a prompt one uid",
            column="uid",
        )
    results = [torch.zeros(mask.shape), torch.zeros(mask.shape)]
    if len(rows):
        counted = data if len(rows) == len(mask) else data.select_idxs(rows)
        parts = estimator.estimate(counted, gamma=gamma, lam=lam, **chosen)
        _check_results(parts, adv_estimator, (len(rows), *mask.shape[1:]))
        results = [torch.zeros(mask.shape, dtype=part.dtype).index_copy(0, rows, part) for part in parts]
    return data.union(DataProto.from_dict({"advantages": results[0], "returns": results[1]}))


def _check_results(results: Any, name: str, expected: tuple[int, ...]) -> None:
    """Raise DataError unless an estimator returned advantages and returns of this shape."""
    parts = results if isinstance(results, tuple | list) else [results]
    shapes = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
    if shapes != [expected, expected]:
        raise DataError(
            f"the advantage estimator {name!r} returned {', '.join(map(str, shapes))}; expected a pair of tensors of "
            f"shape {expected}, advantages and returns",
            shapes=shapes,
            expected=expected,
        )


def _check_rewards(data: DataProto, mask: Tensor) -> None:
    """Raise DataError if a reward of a token that counts is NaN or infinite: it would reach all rows of its group."""
    if "token_level_rewards" not in data.tensor_names:
        return
    (rewards,) = columns(data, "token_level_rewards")
    wrong = (mask.bool() & ~rewards.isfinite()).any(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"token_level_rewards of {int(wrong.sum())} of {len(wrong)} rows are not finite, first of row {row}: set "
            "response_mask of a response without a score to 0, which leaves it out",
            column="token_level_rewards",
            row=row,
        )
