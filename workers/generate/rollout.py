"""What generates, as the worker sees it: Megatron's own generation, or an engine that takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from parallel_state.megatron import MegatronContext
from workers.generate.sampling import Sampling
from workers.weights.hf.model import hf_tensors

__all__ = ["Generated", "PolicyWeights", "Prompts", "Rollout"]


class Prompts(NamedTuple):
    """What is to be continued, on the CPU.

    Attributes:
        ids, attention_mask: int64 ``[rows, prompt]``, padded on the left.
        seeds: int64 ``[rows, n]``: one for each of the ``n`` responses to a row, see ``sampling.sample_seeds``.
    """

    ids: Tensor
    attention_mask: Tensor
    seeds: Tensor

    def samples(self) -> Prompts:
        """The same with a row for every response, those of one prompt next to each other."""
        n = self.seeds.size(1)
        return Prompts(
            self.ids.repeat_interleave(n, 0), self.attention_mask.repeat_interleave(n, 0), self.seeds.view(-1, 1)
        )


class Generated(NamedTuple):
    """What was generated, each ``[rows * n, response_length]``, samples of one prompt next to each other.

    Attributes:
        responses: int64, padded on the right after the stop token.
        mask: int64, 1 up to and including the stop token.
        log_probs: float32, of the policy at the temperature and before top-k and top-p; 0 where the mask is 0.
    """

    responses: Tensor
    mask: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class PolicyWeights:
    """The policy's weights as they are now.

    Iterating gives every tensor of the whole model under its Hugging Face name, one at a time, and no rank ever holds
    the whole model. It is a collective: every rank iterates, to the end. A tensor may share its memory with the
    policy: copy what is kept. See ``workers.weights.hf.model.hf_tensors``.

    Attributes:
        chunks, context: the model chunks of this rank and the layout that they are in, for a rollout of Megatron's.
    """

    chunks: Sequence[Any]
    context: MegatronContext

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return hf_tensors(self.chunks, self.context)


class Rollout(Protocol):
    """An engine that generates. Every rank of the worker has one, and every method is called on every rank.

    Attributes:
        holds_weights: whether it generates with weights of its own. They are then given anew before a generation if
            the policy has changed or the engine has slept since; otherwise for every call.
    """

    @property
    def holds_weights(self) -> bool: ...

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """The responses to this rank's prompts; None where nobody collects them.

        The ranks of one data-parallel shard of the worker's layout are given the same prompts; what the last stage's
        rank at tp 0 and cp 0 gives is the result of the shard.
        """
        ...

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Generate with these weights from now on.

        Returns:
            Numbers to report, the same on every rank: the metrics ``rollout/<name>`` of the batch that follows.
        """
        ...

    def sleep(self) -> int:
        """Free the device memory that it holds: how many bytes. Its weights need not be kept."""
        ...

    def wake_up(self) -> None:
        """Have the device memory again."""
        ...
