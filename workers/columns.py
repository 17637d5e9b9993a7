"""Columns and keys of ``meta_info`` that workers read, and that the program over them writes."""

from __future__ import annotations

ROUTED_EXPERTS = "routed_experts"
"""Column of the experts that routers chose, ``[rows, prompt + response, layers with experts, experts of a token]``."""

TOKEN_TEMPERATURES = "token_temperatures"
"""Column of the temperature at which each token was sampled, float32 ``[rows, response]``: workers score it there."""

HELD_OUT_BATCH = "held_out_batch"
"""Key of the ``meta_info`` of problems that are not trained on: the number of the batch, from 0.

Their samples depend on it, and not on the batches that were sampled before, which they do not change either.
"""

MINI_BATCHES = "mini_batches"
"""Column of the mini-batch of each row in each epoch of an update, int64 ``[rows, epochs]``."""
