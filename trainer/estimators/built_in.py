"""The advantage estimators that come with mcontroller: of tokens, of outcomes, and relative to a group."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcontroller.config.checks import check_one_of
from mcontroller.config.fields import strict_fields
from mcontroller.errors import DataError
from parallel_state.lazy import Lazy
from trainer.estimators.registry import KLInReward, register_advantage_estimator
from workers.losses.masking import inside

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mcontroller.data.batch import DataProto
    from trainer.columns import columns
else:
    torch = Lazy("torch")
    columns = Lazy("trainer.columns", "columns")

BLOCK = 64
"""Tokens whose discounted sums are one matrix product. 32 to 128 take about the same time."""
EXACT = 1 << 20
"""Squares that are added in float32; larger sums are added in float64."""
ROUNDING = 2.0**-20
"""Largest deviation of equal float32 values from their mean, as a share of it."""
SCALES = ("group", "batch", "none")
EPSILON = 1e-6
"""Added to a standard deviation before a division."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return values scaled to mean 0 and variance 1 over the entries with a mask of 1, and 0 for the others.

    Equal values are 0: the rounding of their mean is not scaled up.
    """
    kept = mask.bool()
    result, count = torch.where(kept, values, 0.0), int(kept.sum())
    if not count:
        return result
    mean = float(result.sum()) / count
    result.sub_(mean).mul_(kept)
    if float(torch.linalg.vector_norm(result, math.inf)) <= ROUNDING * abs(mean):
        return result.zero_()
    parts = torch.split(result, max(1, EXACT // max(1, values.size(1))))
    squares = sum(float(torch.linalg.vector_norm(part)) ** 2 for part in parts)
    return result.mul_((squares / count + 1e-8) ** -0.5)


def discounted_sums(values: Tensor, decay: float) -> Tensor:
    """Return ``sum_k decay^k * values[:, t + k]`` of every column ``t``, in the shape and dtype of ``values``.

    Blocks of columns are multiplied by a triangular matrix of powers; only the sum at a block's first column is passed
    on to the block before it. At 1,024 x 8,192 this takes a tenth of the time of a loop over columns.

    Args:
        values: ``[rows, columns]``.
        decay: 0 to 1.
    """
    rows, width = values.shape
    padded = torch.nn.functional.pad(values, (0, -width % BLOCK)).view(rows, -(-width // BLOCK), BLOCK)
    distance = torch.arange(BLOCK)[:, None] - torch.arange(BLOCK)[None, :]
    powers = torch.full((BLOCK, BLOCK), decay, dtype=values.dtype) ** distance.clamp(min=0)
    sums = padded @ torch.where(distance >= 0, powers, 0.0).to(values.dtype)
    to_next_block = torch.full((BLOCK,), decay, dtype=values.dtype) ** torch.arange(BLOCK, 0, -1)
    for block in reversed(range(sums.size(1) - 1)):
        sums[:, block] += sums[:, block + 1, :1] * to_next_block
    return sums.flatten(1)[:, :width]


def packed_left(values: Tensor, mask: Tensor) -> Tensor:
    """Return the entries with a mask of 1 moved to the left of their rows, and 0 for the rest.

    Args:
        values: ``[rows, columns]``.
        mask: the same shape, 1 or 0 in any order.
    """
    mask = mask.bool()
    kept = torch.where(mask, values, 0.0)
    if _is_left(mask):
        return kept
    return torch.zeros_like(kept).scatter_add_(1, _positions(mask), kept)


def unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """Return the inverse of ``packed_left``: entries back at the columns with a mask of 1, and 0 elsewhere."""
    mask = mask.bool()
    spread = values if _is_left(mask) else values.gather(1, _positions(mask))
    return torch.where(mask, spread, 0.0)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _is_left(mask: Tensor) -> bool:
    return not bool((mask[:, 1:] > mask[:, :-1]).any())


@dataclass(frozen=True)
class Groups:
    """Responses to the same prompt, and statistics over them.

    Attributes:
        index: int64 ``[rows]``, the group of every row: 0, 1, ... in the order of the first occurrence of its ``uid``.
    """

    index: Tensor

    @property
    def sizes(self) -> Tensor:
        """Rows in the group of each row, float64 ``[rows]``."""
        return torch.bincount(self.index)[self.index].double()

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` ``[rows]`` over the group of each row, float64 ``[rows]``."""
        groups = int(self.index.max()) + 1 if len(self.index) else 0
        return torch.zeros(groups, dtype=torch.float64).index_add(0, self.index, values.double())[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` ``[rows]`` over the group of each row; exact if they are equal."""
        return torch.where(self.equal(values), values.double(), self.sums(values) / self.sizes)

    def std(self, values: Tensor) -> Tensor:
        """Return the standard deviation (divided by the rows of the group) of ``values`` over each row's group."""
        return self.mean((values.double() - self.mean(values)).square()).sqrt()

    def equal(self, values: Tensor) -> Tensor:
        """Return whether all ``values`` of each row's group are equal, bool ``[rows]``; NaN does not count."""
        groups = int(self.index.max()) + 1 if len(self.index) else 0
        low, high = (
            torch.full((groups,), none, dtype=values.dtype).scatter_reduce(
                0, self.index, values.nan_to_num(none), reduce
            )
            for reduce, none in (("amin", math.inf), ("amax", -math.inf))
        )
        return (low >= high)[self.index]


@dataclass(frozen=True)
class Outcomes:
    """The scores of a batch of responses.

    Attributes:
        scores: float64 ``[rows]``, the sum of the token scores of every response, without a KL penalty.
        penalty: float32 ``[rows, response]``, the sum of the KL penalty in the reward from every token on; None
            without a penalty.
        mask: bool ``[rows, response]``, the tokens of the response.
    """

    scores: Tensor
    penalty: Tensor | None
    mask: Tensor

    def on_tokens(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return an advantage per response, ``[rows]``, on each of its tokens plus the penalty, twice: float32.

        Group statistics never contain the penalty. Differences of the KL inside a group of equal scores would be
        scaled up to noise as large as a real signal.
        """
        spread = advantages.float()[:, None] * self.mask
        if self.penalty is not None:
            spread += self.penalty
        return spread, spread


def outcomes(data: DataProto, gamma: float) -> Outcomes:
    """Return the scores of the responses of a batch.

    Args:
        data: ``token_level_rewards`` and ``response_mask`` ``[rows, response]``, and ``token_level_scores`` if a
            KL penalty is part of the rewards.
        gamma: discount factor per token of the penalty.

    Raises:
        DataError: a column is missing.
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    scores = columns(data, "token_level_scores")[0] if "token_level_scores" in data.tensor_names else rewards
    penalty = None
    if scores is not rewards:
        later = packed_left(inside(rewards.float() - scores.float(), mask), mask)
        penalty = unpacked(discounted_sums(later, gamma), mask)
    return Outcomes(inside(scores, mask).sum(1, dtype=torch.float64), penalty, mask.bool())


def groups_of(data: DataProto) -> Groups:
    """Return the groups of rows with the same ``uid``.

    Raises:
        DataError: the batch has no non-tensor column ``uid``.
    """
    if "uid" not in data.non_tensor_batch:
        hint = "; it is a tensor: pass it among the arrays, DataProto.from_dict(tensors, {'uid': ...})"
        text = "advantages relative to a group need the non-tensor column 'uid'"
        raise DataError(text + hint * ("uid" in data.tensor_names), columns=["uid"])
    uids: Sequence[Hashable] = data.non_tensor_batch["uid"].tolist()
    number = {uid: index for index, uid in enumerate(dict.fromkeys(uids))}
    return Groups(torch.tensor([number[uid] for uid in uids], dtype=torch.long))


# ---- generalized advantage estimation --------------------------------------------------------------------------------


@strict_fields
@dataclass(frozen=True, slots=True)
class GAEOptions:
    """Options of ``adv_estimator=gae``."""

    normalize: bool = True
    """Scale advantages to mean 0 and variance 1 over all response tokens of the batch."""


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of generalized advantage estimation, ``[rows, response]``.

    ``A_t = sum_l (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l})`` over the tokens of the response, with a
    value of 0 after the last one; ``returns = A + V`` (Schulman et al., 2015, arXiv:1506.02438, equation 16). Tokens
    with a mask of 0, at the end or in between (a tool's output), are skipped: their rewards and values do not count.

    Args:
        token_level_rewards: ``[rows, response]``.
        values: ``[rows, response]``, of the critic.
        response_mask: ``[rows, response]``, 1 for the tokens of the response.
        gamma: discount factor per token.
        lam: weight of later errors; 0 is one-step, 1 is Monte Carlo.
    """
    mask = response_mask.bool()
    errors, known = packed_left(token_level_rewards.to(values.dtype), mask), packed_left(values, mask)
    errors.sub_(known)[:, :-1].add_(known[:, 1:], alpha=gamma)
    advantages = unpacked(discounted_sums(errors, gamma * lam), mask)
    return advantages, advantages + inside(values, mask)


@register_advantage_estimator("gae", needs_critic=True, options=GAEOptions)
def gae(data: DataProto, *, gamma: float, lam: float, options: GAEOptions) -> tuple[Tensor, Tensor]:
    """Return ``compute_gae`` with the critic's ``values``."""
    rewards, values, mask = columns(data, "token_level_rewards", "values", "response_mask")
    advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
    return (whiten(advantages, mask) if options.normalize else advantages), returns


# ---- relative to the responses to the same prompt --------------------------------------------------------------------


@strict_fields
@dataclass(frozen=True, slots=True)
class GRPOOptions:
    """Options of ``adv_estimator=grpo``."""

    scale: str = "group"
    """Standard deviation that divides the differences of scores: group, batch, or none (Dr.GRPO)."""
    ddof: int = 0
    """Subtracted from the number of scores in the variance: 0, or 1 as TRL and verl do."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.grpo.scale", self.scale, SCALES)
        check_one_of("algorithm.grpo.ddof", str(self.ddof), ("0", "1"))


@strict_fields
@dataclass(frozen=True, slots=True)
class RLOOOptions:
    """Options of ``adv_estimator=rloo``."""

    scale: str = "none"
    """Standard deviation that divides the differences of scores: others (of the other responses to the prompt, with
    Bessel's correction; not if it is 0), or none."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.rloo.scale", self.scale, ("others", "none"))


@strict_fields
@dataclass(frozen=True, slots=True)
class GPGOptions:
    """Options of ``adv_estimator=gpg``."""

    scale: str = "none"
    """Standard deviation that divides the differences of scores: group, or none."""

    def __post_init__(self) -> None:
        check_one_of("algorithm.gpg.scale", self.scale, ("group", "none"))


@register_advantage_estimator("grpo", needs_group=True, kl_in_reward=KLInReward.REJECTED, options=GRPOOptions, reads=())
def grpo(data: DataProto, *, gamma: float, lam: float, options: GRPOOptions) -> tuple[Tensor, Tensor]:
    """Return ``(R - mean) / std`` on each token, over the responses to the same prompt.

    Shao et al., 2024, arXiv:2402.03300, section 4.1.2; without the division it is Dr.GRPO (Liu et al., 2025,
    arXiv:2503.20783, section 3.2).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    centered = result.scores - groups.mean(result.scores)
    if options.scale == "none":
        return result.on_tokens(centered)
    if options.scale == "group":
        sizes = groups.sizes
        std = groups.std(result.scores) * (sizes / (sizes - options.ddof).clamp(min=1)).sqrt()
    else:
        std = result.scores.std(correction=min(options.ddof, len(data) - 1))
    return result.on_tokens(centered / (std + EPSILON))


@register_advantage_estimator("rloo", needs_group=True, options=RLOOOptions, reads=())
def rloo(data: DataProto, *, gamma: float, lam: float, options: RLOOOptions) -> tuple[Tensor, Tensor]:
    """Return the score minus the mean of the other responses to the same prompt, on each token.

    Ahmadian et al., 2024, arXiv:2402.14740, equation 8. With ``scale="others"`` it is divided by the standard deviation
    of the other responses, as NeMo-RL's GRPO with a leave-one-out baseline; a difference from equal scores is not.
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    others = groups.sizes / (groups.sizes - 1).clamp(min=1)
    centered = result.scores - groups.mean(result.scores)
    advantages = centered * others
    if options.scale == "others":
        left = groups.sums(centered.square()) - centered.square() * others  # squares of the others about their mean
        tolerance = 1e-12 * (1.0 + groups.sums(result.scores.square()))
        std = torch.where(left > tolerance, left / (groups.sizes - 2).clamp(min=1), 0.0).sqrt()
        advantages = torch.where(std > 0, advantages / (std + EPSILON), advantages)
    return result.on_tokens(advantages)


@register_advantage_estimator("opo", needs_group=True, reads=())
def opo(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the score minus the mean of the group weighted by the length of the responses, on each token.

    The weights make the variance of the gradient least if the squared norms of the responses' gradients are
    proportional to their lengths (Hao et al., 2025, arXiv:2505.23585).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    lengths = result.mask.sum(1).double()
    baseline = groups.sums(lengths * result.scores) / groups.sums(lengths).clamp(min=1)
    baseline = torch.where(groups.equal(result.scores), result.scores, baseline)
    return result.on_tokens(result.scores - baseline)


@register_advantage_estimator("gpg", needs_group=True, kl_in_reward=KLInReward.REJECTED, options=GPGOptions, reads=())
def gpg(data: DataProto, *, gamma: float, lam: float, options: GPGOptions) -> tuple[Tensor, Tensor]:
    """Return ``alpha * (R - mean)`` on each token, over the responses to the same prompt.

    ``alpha`` is the number of responses of the batch divided by those in groups of unequal scores, which alone have a
    gradient (Chu et al., 2025, arXiv:2504.02546).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    signal = (~groups.equal(result.scores)).sum().clamp(min=1)
    advantages = (result.scores - groups.mean(result.scores)) * len(data) / signal
    if options.scale == "group":
        advantages = advantages / (groups.std(result.scores) + EPSILON)
    return result.on_tokens(advantages)


# ---- REINFORCE -------------------------------------------------------------------------------------------------------


@strict_fields
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusOptions:
    """Options of ``adv_estimator=reinforce_plus_plus``."""

    normalize: bool = True
    """Scale advantages to mean 0 and variance 1 over all response tokens of the batch."""


@strict_fields
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaselineOptions:
    """Options of ``adv_estimator=reinforce_plus_plus_baseline``."""

    normalize: bool = True
    """Divide advantages by their standard deviation over all responses of the batch."""


@register_advantage_estimator(
    "reinforce_plus_plus", kl_in_reward=KLInReward.DEFAULT, options=ReinforcePlusPlusOptions, reads=("gamma",)
)
def reinforce_plus_plus(
    data: DataProto, *, gamma: float, lam: float, options: ReinforcePlusPlusOptions
) -> tuple[Tensor, Tensor]:
    """Return ``sum_k gamma^k * r_{t+k}``, normalized over the tokens of the batch.

    Hu, 2025, arXiv:2501.03262; the rewards contain the KL penalty.
    """
    rewards, mask = columns(data, "token_level_rewards", "response_mask")
    returns = _returns(rewards, mask, gamma)
    advantages = whiten(returns, mask) if options.normalize else returns
    return advantages.float(), returns.float()


@register_advantage_estimator(
    "reinforce_plus_plus_baseline", needs_group=True, options=ReinforcePlusPlusBaselineOptions, reads=()
)
def reinforce_plus_plus_baseline(
    data: DataProto, *, gamma: float, lam: float, options: ReinforcePlusPlusBaselineOptions
) -> tuple[Tensor, Tensor]:
    """Return ``(R - mean of the group) / std of the batch`` on each token.

    The mean of ``R - mean of the group`` over the batch is 0, so that normalization over responses only divides: a
    group of equal scores keeps an advantage of exactly 0 (Hu, 2025, arXiv:2501.03262).
    """
    result, groups = outcomes(data, gamma), groups_of(data)
    advantages = result.scores - groups.mean(result.scores)
    if options.normalize:
        advantages = advantages / (advantages.square().mean().sqrt() + EPSILON)
    return result.on_tokens(advantages)


@register_advantage_estimator("remax", needs_greedy=True, reads=("gamma",))
def remax(data: DataProto, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return ``sum_k gamma^k * r_{t+k}`` minus the score of the greedy response to the same prompt.

    Li et al., 2023, arXiv:2310.10505. ``greedy_scores``, float32 ``[rows]``, has the greedy scores.
    """
    rewards, greedy, mask = columns(data, "token_level_rewards", "greedy_scores", "response_mask")
    returns = _returns(rewards, mask, gamma)
    advantages = torch.where(mask.bool(), returns - greedy[:, None], 0.0)
    return advantages.float(), returns.float()


def _returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return ``sum_k gamma^k * r_{t+k}`` over the tokens of the response, in the shape and dtype of ``rewards``."""
    return unpacked(discounted_sums(packed_left(rewards, mask), gamma), mask)
