"""One run of the checks; and one case, whose results do not depend on the device: scores, tokens, updates, checkpoint.

The CPU's results come from a process that starts with an empty CUDA_VISIBLE_DEVICES and computes while the GPU works.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import Tensor

from workers.gpucheck.cases import ONE_PROCESS, ROWS, STEPS, batch_columns
from workers.gpucheck.policy import FULL, PROMPT, RESPONSE, SIZES, TINY, Policy, actor_config

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


class Session:
    """One run of the checks on the current GPU; a context manager that ends its process and removes its files.

    Args:
        tiny: whether models, rows and repetitions are the smallest with which every check runs.
        folder: where checkpoints of the size of the model are saved; None for the folder of temporary files.

    Attributes:
        scale: sizes of the model of parts b to d.
        layers: the implementations of layers that this machine can use.
    """

    def __init__(self, *, tiny: bool, folder: Path | None = None) -> None:
        self.tiny = tiny
        self.scale = TINY if tiny else FULL
        self.layers = ["local", "transformer_engine"] if HAVE_TE else ["local"]
        self.folder = Path(tempfile.mkdtemp(prefix="gpucheck", dir=folder))
        self.cpu_folder = self.folder / "cpu"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    @functools.cached_property
    def cpu(self) -> CpuProcess:
        """The process that computes the CPU's results; it starts with the first call."""
        return CpuProcess()

    @property
    def implementation(self) -> str:
        """The implementation of the layers that a run would use."""
        return self.layers[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if "cpu" in vars(self):
            self.cpu.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
