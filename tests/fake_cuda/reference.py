"""Results of one process on the CPU, without the fake CUDA device: ``python -m tests.fake_cuda.reference FILE``."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.workers.roles import GREEDY, actor, experience, own_shard, prompts, weights

ROWS = 8


def computed(parallel: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return responses and scores before an update, its metrics, and the weights after it, of this rank's rows."""
    worker = actor(parallel, rollout={"prompt_length": 10, "response_length": 6, "seed": 3}, **changes)
    generated = worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker))
    scored = worker.compute_log_prob(own_shard(experience(ROWS), worker))
    metrics = worker.update_actor(own_shard(experience(ROWS), worker)).meta_info["metrics"]
    return {
        "responses": None if generated is None else generated.batch["responses"],
        "log_probs": None if scored is None else scored.batch["old_log_probs"],
        "grad_norm": metrics["actor/grad_norm"],
        "weights": weights(worker),
    }


if __name__ == "__main__":
    from parallel_state import cpu
    from tests.forking import run_ranks

    assert cpu.install()
    torch.save(run_ranks(computed, 1, {})[0], sys.argv[1])
