"""What an engine is to a rollout: the whole interface, for vLLM's engines and for another one.

An engine has a batch and an event loop of its own. It takes requests one by one, at any time and from many sides, and
nobody above it decides what its next step computes. ``TrajectoryRollout(group, engines=[...])`` has a ``Router`` before
its engines, which sends each request to one of them; ``generate_by_requests`` divides a batch evenly over engines.

Weights are not part of it: they move from worker to worker, and ``workers.Rollout`` is the interface of the worker's
side: ``update_weights``, then ``resume`` with the version when all ranks have them, ``sleep`` and ``wake_up``. An
engine may go on with its requests in flight between two tokens, with the new weights; then it says so in ``versions``.

``workers/generate/vllm/vllm_engine.py`` is one engine, and ``examples/http_rollout.py`` another. ``ReferenceEngine``,
of Megatron's ranks, does nothing by itself: a rollout makes its steps, so that tests are deterministic.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mcontroller.errors import DataError, MControllerError


class EngineLost(MControllerError):
    """An engine that takes no more requests: its process or its connection has ended, or it is silent.

    The router sends its requests to the others.

    Attributes:
        engine: its name.
        was_silent: whether its process and its connection live, and it has not answered in time.
    """

    engine: str
    was_silent: bool = False


class RequestFailed(MControllerError):
    """A request that an engine rejected, which it would reject again; the engine goes on with the others.

    Attributes:
        engine: the name of the engine.
        length: [tokens] of the prompt.
    """

    engine: str
    length: int


class Sampled(NamedTuple):
    """What an engine generated for a request.

    Attributes:
        tokens: token ids, up to and including the stop token: type code ``q``.
        log_probs: one for each token, of the policy at the request's temperature, before all filters: type code ``d``;
            None if the engine does not know them.
        versions: in the order of the tokens, the version of the policy and how many tokens it made. If an engine does
            not know them, the trainer cannot correct for tokens of older policies: return ``[(0, len(tokens))]``.
        is_partial: whether the engine stopped before a stop token or the limit, such as for new weights or after a
            step. The rollout submits the rest again.
        basis: what the log-probabilities are of, the fields of ``workers.LogProbBasis``, if that is something else.
        experts: integers ``[prompt + tokens - 1, layers with experts, topk]``, if the engine records them.
    """

    tokens: array[int]
    log_probs: array[float] | None
    versions: Sequence[tuple[int, int]]
    is_partial: bool = False
    basis: Mapping[str, Any] | None = None
    experts: Tensor | None = None


def check_answer(answer: Sampled, most: int, vocab_size: int) -> None:
    """Check that an engine answers as ``Sampled`` says, with tokens of the policy.

    Args:
        answer: of the engine, or a part of one.
        most: [tokens] of its request.
        vocab_size: of the policy.

    Raises:
        DataError: it does not, or shows that it has another model; ``field`` is ``tokens``.
    """
    made, counted = len(answer.tokens), sum(count for _, count in answer.versions)
    scored = made if answer.log_probs is None else len(answer.log_probs)
    if made > most or not made == counted == scored:
        raise DataError(
            f"an engine returned {made} tokens with {scored} log-probabilities and the versions of {counted} "
            f"tokens; expected one of each for every token, and at most {most} tokens",
            field="tokens",
            length=made,
        )
    least, greatest = min(answer.tokens, default=0), max(answer.tokens, default=0)
    if not 0 <= least <= greatest < vocab_size:
        raise DataError(
            f"an engine returned tokens from {least} to {greatest}, and the policy's are 0 to {vocab_size - 1}: it has "
            "another model. Start it with the policy's",
            field="tokens",
            token=greatest if least >= 0 else least,
        )


class Engine(Protocol):
    """An engine of a rollout, used on one event loop.

    Attributes:
        name: for errors and counts, such as its address.
    """

    name: str

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        """Generate a response. Cancelling the coroutine ends the request in the engine.

        Args:
            prompt: token ids, type code ``q``.
            sampling: ``response_length`` ([tokens] the most), ``eos_token_id`` (one or several), ``seed`` (64 bits,
                signed), and those of ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and
                ``do_sample`` that differ from the workers' configuration.
            on_part: called on the event loop with the tokens that were generated since the last call, while the engine
                goes on; what is returned is the rest. None, or an engine that cannot: all are returned together.

        Raises:
            EngineLost: the engine takes no more requests.
            RequestFailed: it rejects this one.
        """
        ...

    async def close(self) -> None:
        """Close the connection to the engine; requests in flight raise ``EngineLost``."""
        ...


class EngineAddress(Protocol):
    """Where an engine takes requests, from any process; it can be pickled."""

    def connect(self) -> Engine:
        """Return the engine; its first request opens the connection."""
        ...
