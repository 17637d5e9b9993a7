"""Logits of vocabulary entries that exist only so that tp divides the vocabulary: never probable, never sampled."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

# Far below any logit, at any temperature in use, and finite: 0 * it is 0 where 0 * -inf would be NaN (an entropy).
_IMPOSSIBLE = -3.0e4


def mask_padded_vocabulary(chunk: GPTModel, vocab_size: int) -> None:
    """Make the logits of entries from ``vocab_size`` on impossible, whether gathered over tp or not.

    The chunk's ``unpadded_vocab_size`` is ``vocab_size`` from now on.
    """
    chunk.unpadded_vocab_size = vocab_size
    if not chunk.post_process or chunk.vocab_size == vocab_size:
        return
    tp_rank = chunk.pg_collection.tp.rank()

    def mask(layer: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        held = logits.size(-1)
        first = 0 if held == chunk.vocab_size else tp_rank * held
        real = min(max(vocab_size - first, 0), held)
        logits.narrow(-1, real, held - real).fill_(_IMPOSSIBLE)

    chunk.output_layer.register_forward_hook(mask)
