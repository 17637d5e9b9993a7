"""The protocol between a worker and the engine that generates for it, Megatron's or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from workers.generate.engine_protocol import EngineAddress
from workers.generate.sampling import Sampling
from workers.weights.fingerprints import Fingerprint
from workers.weights.whole_tensors import PolicyWeights, Receivers


class Prompts(NamedTuple):
    """The prompts of one rank; on the CPU when a rollout receives them.

    Attributes:
        ids: int64 ``[rows, prompt]``, padded on the left.
        attention_mask: int64 ``[rows, prompt]``.
        seeds: int64 ``[rows, n]``, one for each of the ``n`` responses to a row; see ``sampling.sample_seeds``.
    """

    ids: Tensor
    attention_mask: Tensor
    seeds: Tensor

    def samples(self) -> Prompts:
        """Return the prompts with one row for every response; the rows of one prompt are next to each other."""
        n = self.seeds.size(1)
        return Prompts(
            self.ids.repeat_interleave(n, 0), self.attention_mask.repeat_interleave(n, 0), self.seeds.view(-1, 1)
        )


class LogProbBasis(NamedTuple):
    """The distribution of the next token that an engine's log-probabilities are of.

    Attributes:
        temperature: the divisor of the logits.
        filtered: False: of the policy, over the whole vocabulary. True: of the distribution that the tokens are drawn
            from, after the repetition penalty, top-k, top-p and min-p.
    """

    temperature: float
    filtered: bool


class Generated(NamedTuple):
    """Generated responses, each ``[rows * n, response_length]``; the responses to one prompt are next to each other.

    Attributes:
        responses: int64, padded on the right after the stop token.
        mask: int64, 1 up to and including the stop token.
        log_probs: float32, 0 where the mask is 0.
        basis: what ``log_probs`` are of. None: of the policy at the temperature of the batch, before top-k and top-p,
            as ``compute_log_prob`` returns them. Others are not comparable with them, and become the column
            ``engine_log_probs`` instead of ``rollout_log_probs``.
        routed_experts: integers ``[rows * n, prompt + response_length, layers, topk]``, the experts that computed each
            token of prompt and response, in the layers that have experts; -1 for padding, and for the last token of a
            response, which nothing is predicted from. ``router_replay=rollout`` needs them; otherwise None.
    """

    responses: Tensor
    mask: Tensor
    log_probs: Tensor
    basis: LogProbBasis | None = None
    routed_experts: Tensor | None = None

    def columns(self) -> list[Tensor]:
        """Return the tensors that have one row for each response: three, or four with ``routed_experts``."""
        return [*self[:3], *([] if self.routed_experts is None else [self.routed_experts])]

    @staticmethod
    def of_columns(columns: Sequence[Tensor]) -> Generated:
        """Return responses with the tensors of ``columns()``, and log-probabilities of the policy."""
        responses, mask, log_probs = columns[:3]
        return Generated(responses, mask, log_probs, routed_experts=columns[3] if len(columns) > 3 else None)


class Rollout(Protocol):
    """What a worker has of an engine: its weights, its memory, and batches. Derive from it.

    Every rank of the worker has one, and every method is called on every rank. An engine that takes requests by itself
    is an ``Engine`` to those who send them.
    """

    @property
    def receivers(self) -> Receivers:
        """The ranks on which the whole tensors of an update are put together, the same on every rank."""
        return "all"

    @property
    def sleeps_beside_training(self) -> bool:
        """Whether the engine must sleep while the policy computes, since it has the rest of the memory of its GPUs."""
        return False

    @property
    def takes_requests(self) -> bool:
        """Whether programs send requests to the engine itself, at its ``address``."""
        return False

    def address(self) -> EngineAddress | None:
        """Return where the engine of this rank takes requests, if it ``takes_requests`` and this rank has one.

        Called on every rank. The engine has its weights.
        """
        return None

    @property
    def holds_weights(self) -> bool:
        """Whether the engine keeps a copy of the weights.

        If it does, ``update_weights`` is called before a generation only if the policy has changed or the engine has
        slept since the last one. If it does not, ``update_weights`` is called before every generation.
        """
        ...

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Generate responses to this rank's prompts.

        All ranks of one data-parallel shard of the worker's layout receive the same prompts. The result of the shard
        is that of its rank on the last stage at tp 0 and cp 0; other ranks may return None.

        Args:
            prompts: the prompts, on the CPU.
            sampling: how to generate the batch.

        Returns:
            The responses, on any device; None on ranks that do not return them.
        """
        ...

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Generate with these weights from now on.

        Returns:
            Numbers to report, the same on every rank: the metrics ``rollout/<name>`` of the next batch.
        """
        ...

    def resume(self, version: int) -> None:
        """Generate with the weights of the last update, which have arrived on all ranks.

        An engine that generates between calls stays paused until then.

        Args:
            version: of the policy, for the tokens that follow.
        """
        return None  # without it a type checker takes the method for an abstract one

    def sleep(self) -> int:
        """Free the device memory of the engine, and return how many bytes; its weights need not be kept."""
        return 0

    def wake_up(self) -> None:
        """Allocate the device memory again, now or when the next update or generation needs it."""
        return None


@runtime_checkable
class ReadableRollout(Protocol):
    """The optional method of a ``Rollout`` whose weights are verified after every update."""

    def fingerprints(self) -> Sequence[Fingerprint]:
        """Return the fingerprints of the tensors that this rank's engine has now; none on a rank without an engine.

        They have Hugging Face names and the engine's dtypes. An engine that holds several copies of a tensor reports
        each, under the tensor's name. Called on every rank. An engine with whole tensors in this process returns
        ``tensor_fingerprints(model.named_parameters())``.
        """
        ...
