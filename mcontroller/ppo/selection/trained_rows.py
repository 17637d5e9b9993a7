"""The rows of a batch that are trained on: those whose response mask is not 0."""

from __future__ import annotations

from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.ppo.data import columns

__all__ = ["trained_on"]


def trained_on(batch: DataProto, kept: Tensor) -> DataProto:
    """Return the batch with a ``response_mask`` of 0 in all rows but those that are kept.

    A row without response tokens is in no loss, no average and no baseline.

    Args:
        batch: responses with ``response_mask`` ``[rows, response]``.
        kept: bool ``[rows]``.
    """
    if bool(kept.all()):
        return batch
    (mask,) = columns(batch, "response_mask")
    return batch.with_tensors({"response_mask": mask * kept[:, None]})
