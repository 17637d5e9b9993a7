"""Run one case, whose results do not depend on the device: scores, tokens, updates, a checkpoint.

The CPU's results come from a process that starts with an empty CUDA_VISIBLE_DEVICES and computes while the GPU works.
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.gpucheck.cases import ONE_PROCESS, ROWS, STEPS, batch_columns
from workers.gpucheck.policy import Policy, actor_config

__all__ = ["BATCH", "PROMPT", "RESPONSE", "SIZES", "CaseRun", "CpuProcess", "can_save", "continue_case", "run_case"]

PROMPT, RESPONSE = 24, 16
SIZES: dict[str, Any] = {
    "vocab_size": 509,
    "max_sequence_length": 64,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "init_method_std": 0.05,
}
"""Fields of ModelConfig: widths that kernels of a GPU accept."""

BATCH = batch_columns(ROWS, PROMPT, RESPONSE, SIZES["vocab_size"])


@dataclass(frozen=True, slots=True)
class CaseRun:
    """A case of ``ONE_PROCESS`` in a dtype.

    Attributes:
        case: its name.
        dtype: ``float32`` or ``bfloat16``.
        implementation: ``local`` or ``transformer_engine``.
    """

    case: str
    dtype: str = "float32"
    implementation: str = "local"

    def __str__(self) -> str:
        return f"{self.case} {self.dtype}" + (" TE" if self.implementation != "local" else "")

    @property
    def on_cpu(self) -> CaseRun:
        """The same case and dtype with the layers that run on a CPU."""
        return CaseRun(self.case, self.dtype)

    def settings(self) -> dict[str, Any]:
        """Return the fields of ActorConfig."""
        sizes = SIZES | {"transformer_impl": self.implementation}
        rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}
        return ONE_PROCESS[self.case].settings(self.dtype, sizes) | {"rollout": rollout, "ppo_micro_batch_size": 4}

    def policy(self) -> Policy:
        """Return the policy with its initial weights."""
        return Policy(actor_config(self.settings()))


def can_save() -> bool:
    """Return whether checkpoints can be saved: Megatron-Core needs psutil for it, and does not install it."""
    return importlib.util.find_spec("psutil") is not None


def run_case(run: CaseRun, folder: Path) -> dict[str, Any]:
    """Score, generate and train.

    Args:
        run: what to compute.
        folder: for the checkpoint after the first update, if ``can_save``.

    Returns:
        ``scores`` and ``after`` (log-probabilities before and after the updates, ``[rows, response]``), ``greedy`` and
        ``sampled`` (tokens), ``drift`` (the mean difference between the log-probabilities of greedy tokens that
        generation and scoring return), ``metrics`` of each update, and ``weights`` by name; all on the CPU.
    """
    with run.policy() as policy:
        greedy = policy.generate(BATCH, do_sample=False)
        results: dict[str, Any] = {
            "scores": policy.scores(BATCH),
            "greedy": greedy.responses.cpu(),
            "sampled": policy.generate(BATCH, top_p=0.9, top_k=50, n=2).responses.cpu(),
        }
        mask = greedy.mask.cpu()
        responses = results["greedy"] * mask
        generated = {
            "input_ids": torch.cat((BATCH["input_ids"][:, :PROMPT], responses), 1),
            "attention_mask": torch.cat((BATCH["attention_mask"][:, :PROMPT], mask), 1),
            "responses": responses,
            "response_mask": mask,
        }
        differences = (policy.scores(generated) - greedy.log_probs.cpu()) * mask
        results["drift"] = float(differences.abs().sum() / mask.sum())
        metrics = [policy.update(BATCH)]
        if can_save():
            policy.call("save_checkpoint", str(folder / str(run)), 1)
        metrics += [policy.update(BATCH) for _ in range(STEPS - 1)]
        weights = {name: parameter.float().cpu() for name, parameter in policy.parameters()}
        return results | {"metrics": metrics, "weights": weights, "after": policy.scores(BATCH)}


def continue_case(run: CaseRun, checkpoint: Path) -> Tensor:
    """Load the checkpoint of a run, make the remaining updates, and return the scores: ``after``."""
    with run.policy() as policy:
        policy.call("load_checkpoint", str(checkpoint))
        for _ in range(STEPS - 1):
            policy.update(BATCH)
        return policy.scores(BATCH)


class CpuProcess:
    """A process without a GPU."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Start a call in the process, and return a function that waits for its result."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the first call starts the process, which inherits this
        try:
            future: Future[bytes] = self._pool.submit(_dumped, call, *arguments)
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if visible is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
        return lambda: torch.load(io.BytesIO(future.result(_TIMEOUT_S)), weights_only=False)

    def end(self) -> None:
        """End the process, without waiting for calls that have not started."""
        self._pool.shutdown(cancel_futures=True)


_TIMEOUT_S = 300.0


def _dumped(call: Callable[..., Any], *arguments: Any) -> bytes:
    file = io.BytesIO()
    torch.save(call(*arguments), file)
    return file.getvalue()
