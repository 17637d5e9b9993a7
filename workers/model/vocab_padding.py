"""Mask the logits of padding entries of the vocabulary, which exist only so that tp divides it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

# Far below any logit at any temperature, but finite: a probability of 0 times -inf would make an entropy NaN.
_IMPOSSIBLE = -3.0e4


def mask_padded_vocabulary(chunk: GPTModel, vocab_size: int) -> None:
    """Set the probability of entries from ``vocab_size`` on to 0, in logits that are gathered over tp or not.

    Args:
        chunk: a chunk of the model; ``chunk.unpadded_vocab_size`` is set to ``vocab_size``.
        vocab_size: number of entries without padding.
    """
    chunk.unpadded_vocab_size = vocab_size
    if not chunk.post_process or chunk.vocab_size == vocab_size:
        return
    tp_rank = chunk.pg_collection.tp.rank()

    def mask(layer: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        width = logits.size(-1)
        first = 0 if width == chunk.vocab_size else tp_rank * width
        real = min(max(vocab_size - first, 0), width)
        logits.narrow(-1, real, width - real).fill_(_IMPOSSIBLE)

    chunk.output_layer.register_forward_hook(mask)
