"""Responses to problems: from one call of the rollout's group, or as a program's own rollout function calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from mcontroller.group import WorkerGroup
from mcontroller.ppo.data import columns

__all__ = ["GenerateSequences", "RolloutFunction", "generate_responses", "start_responses"]

GenerateSequences = Callable[[DataProto], DataProto]
"""``generate_sequences`` of the rollout's group."""

RolloutFunction = Callable[[DataProto, GenerateSequences], DataProto]
"""A program's own rollout loop: generates the responses to problems with calls of the rollout.

It gets problems: ``input_ids`` and ``attention_mask`` ``[rows, prompt]``, the further columns of the data set, and the
``meta_info`` of ``generate_sequences``. It returns a batch with the columns of ``generate_sequences``, ``n`` rows for
each problem next to each other, in the order of the problems. ``response_mask`` is 1 for the tokens that the policy
sampled, which are trained on; ``attention_mask`` is 1 for all tokens of a response. It may add ``truncated``, bool
``[rows]``: whether a response was cut off; without it, those are the responses that do not end with a stop token.
"""


def start_responses(
    rollout: WorkerGroup[Any], problems: DataProto, sampling: Mapping[str, Any], rollout_fn: RolloutFunction | None
) -> DataProto:
    """Start to generate the responses to problems, and return them; only ``rollout_fn`` is waited for.

    Args:
        rollout: the group that generates.
        problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
        sampling: the ``meta_info`` of ``generate_sequences``.
        rollout_fn: calls the rollout. None: one call.

    Raises:
        DataError: ``rollout_fn`` returned a row with another prompt than that of its problem, or too few rows.
    """
    if rollout_fn is None:
        prompts = problems.select(["input_ids", "attention_mask"], non_tensor_batch_keys=[])
        prompts.meta_info = dict(sampling)
        generated: DataProto = rollout.generate_sequences.options(blocking=False)(prompts)
        return generated
    asked = problems.select(["input_ids", "attention_mask"])
    asked.meta_info = dict(sampling)
    responses = rollout_fn(asked, rollout.generate_sequences)
    _check_prompts(responses, problems)
    return responses


def generate_responses(
    rollout: WorkerGroup[Any],
    problems: DataProto,
    sampling: Mapping[str, Any],
    rollout_fn: RolloutFunction | None,
) -> tuple[DataProto, DataProto]:
    """Return the responses to problems, and the problems' other columns, repeated for each response.

    Args:
        rollout: the group that generates.
        problems: rows of ``input_ids`` and ``attention_mask`` ``[prompt]``.
        sampling: the ``meta_info`` of ``generate_sequences``.
        rollout_fn: calls the rollout. None: one call.
    """
    others = problems.select([], non_tensor_batch_keys=None)
    responses = start_responses(rollout, problems, sampling, rollout_fn)
    return responses, others.repeat(len(responses) // len(problems))


def _check_prompts(responses: DataProto, problems: DataProto) -> None:
    """Raise DataError for the first row that does not have the prompt of its problem, both padded on the left."""
    n = -(-len(responses) // len(problems))
    given, attended, answers = columns(responses, "input_ids", "attention_mask", "responses")
    ids, mask = columns(problems, "input_ids", "attention_mask")
    width = max(ids.shape[1], given.shape[1] - answers.shape[1])
    expected = _prompts(ids, mask, ids.shape[1], width).repeat_interleave(n, 0)
    found = _prompts(given, attended, given.shape[1] - answers.shape[1], width)
    wrong = (found != expected[: len(found)]).any(1).nonzero().flatten().tolist()
    if wrong or len(found) < len(expected):
        row = wrong[0] if wrong else len(found)
        problem = "has another prompt than" if wrong else "is missing; it has the prompt of"
        raise DataError(
            f"rollout_fn returned {len(responses)} rows for {len(problems)} problems, and row {row} {problem} problem "
            f"{row // n}, which is scored there: return equally many rows for each problem, next to each other, in the "
            "order of the problems, with their prompts unchanged",
            row=row,
            rows=len(responses),
            problems=len(problems),
        )


def _prompts(ids: Tensor, mask: Tensor, columns_of_prompt: int, width: int) -> Tensor:
    """Return the token ids of prompts, int64 ``[rows, width]``, padded on the left with -1."""
    kept = ids[:, :columns_of_prompt].masked_fill(mask[:, :columns_of_prompt] == 0, -1)
    return pad(kept, (width - columns_of_prompt, 0), value=-1)
