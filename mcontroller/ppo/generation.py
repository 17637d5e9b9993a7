"""Responses to problems: from one call of the rollout's group, or as a program's own rollout function calls it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.future import Future
from mcontroller.dispatch.referenced import ReferencedBatch
from mcontroller.group import WorkerGroup

__all__ = ["GenerateSequences", "RolloutFunction", "generate_responses", "start_responses"]

GenerateSequences = Callable[[DataProto], DataProto]
"""``generate_sequences`` of the rollout's group."""

RolloutFunction = Callable[[DataProto, GenerateSequences], DataProto]
"""A program's own rollout loop: generates the responses to problems with calls of the rollout.

It gets problems: ``input_ids`` and ``attention_mask`` ``[rows, prompt]``, the further columns of the data set, and the
``meta_info`` of ``generate_sequences``. It returns a batch with the columns of ``generate_sequences``, ``n`` rows for
each problem next to each other. ``response_mask`` is 1 for the tokens that the policy sampled, which are trained on;
``attention_mask`` is 1 for all tokens of a response.
"""


def start_responses(
    rollout: WorkerGroup[Any], problems: DataProto, sampling: Mapping[str, Any], rollout_fn: RolloutFunction | None
) -> Future[Any] | DataProto:
    """Start to generate the responses to problems; return their future, or what ``rollout_fn`` returns.

    Args:
        rollout: the group that generates.
        problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
        sampling: the ``meta_info`` of ``generate_sequences``.
        rollout_fn: calls the rollout. None: one call.
    """
    if rollout_fn is None:
        prompts = problems.select(["input_ids", "attention_mask"], non_tensor_batch_keys=[])
        prompts.meta_info = dict(sampling)
        future: Future[Any] = rollout.generate_sequences.options(blocking=False)(prompts)
        return future
    asked = problems.select(["input_ids", "attention_mask"])
    asked.meta_info = dict(sampling)
    return rollout_fn(asked, rollout.generate_sequences)


def generate_responses(
    rollout: WorkerGroup[Any],
    problems: DataProto,
    sampling: Mapping[str, Any],
    read: Collection[str] | None,
    rollout_fn: RolloutFunction | None,
) -> tuple[ReferencedBatch, DataProto]:
    """Return the responses to problems, and the problems' other columns, repeated for each response.

    Args:
        rollout: the group that generates.
        problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
        sampling: the ``meta_info`` of ``generate_sequences``.
        read: the columns of the responses to read here; the others stay on the workers. None: all.
        rollout_fn: calls the rollout; all columns that it returns are here. None: one call.
    """
    others = problems.select([], non_tensor_batch_keys=None)
    responses = ReferencedBatch.of(start_responses(rollout, problems, sampling, rollout_fn), read)
    return responses, others.repeat(len(responses) // len(problems))
