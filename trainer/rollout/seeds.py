"""Seeds of responses: one function for trainer, episodes, clients and programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from workers.columns import HELD_OUT_BATCH

TRAINING = "training"
"""The purpose of the seeds of the responses to the problems of a run."""


def seed_of(run_seed: int, purpose: str, *numbers: int) -> int:
    """Return the seed of a response, 64 bits, signed: another one for each seed, purpose and numbers.

    Args:
        run_seed: of the run, ``rollout.seed``; or of a response, for what belongs to it.
        purpose: what the numbers count, so that equal numbers of two kinds have different seeds; ``TRAINING`` for
            those of the problem, of the sample of the problem, and of the attempt.
        numbers: of the response.
    """
    parts = (run_seed, *numbers) if purpose == TRAINING else (run_seed, *numbers, purpose)
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def count_call(group: Any, meta_info: Mapping[str, Any] | None = None) -> int:
    """Return how many batches a group has sampled before, and count one more: a checkpoint has the number.

    Args:
        group: of workers that generate. 0 if they do not count.
        meta_info: of the batch. Held-out problems, whose number is negative, and greedy responses are not counted.
    """
    info = meta_info or {}
    if HELD_OUT_BATCH in info:
        return -1 - int(info[HELD_OUT_BATCH])
    calls: int | None = group.sampling_state()[0].get("sampled_batches")
    if calls is None:
        return 0
    if info.get("do_sample", True):
        group.restore_sampling({"sampled_batches": calls + 1})
    return calls
