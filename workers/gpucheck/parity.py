"""Part a: scores, tokens, updates and checkpoints of the parity cases, on this machine's GPU and on its CPU.

The CPU's results come from a process that starts with an empty CUDA_VISIBLE_DEVICES and computes while the GPU works.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcontroller import DataProto
from workers.gpucheck.cases import ONE_PROCESS, ROWS, STEPS, batch_columns, prompt_columns
from workers.gpucheck.policy import FULL, TINY, TINY_MODEL, TOKENS, Policy, Scale, actor_config
from workers.gpucheck.rows import Row, at_most, skipped

PROMPT, RESPONSE = 24, 16
LAYERS = ["local", "transformer_engine"] if HAVE_TE else ["local"]
"""The implementations of layers that this machine can use; a run uses the last."""
CAN_SAVE = find_spec("psutil") is not None
"""Megatron-Core saves with psutil, and does not install it."""
_ADVICE = "the first of scores, tokens and updates that fails has the cause; see docs/gpu.md, 'If a row fails'"


@dataclass(frozen=True)
class Session:
    """One run of the checks.

    Attributes:
        tiny: whether models, rows and repetitions are the smallest with which every check runs.
        folder: for checkpoints.
        cpu: a process that sees no GPU.
        vllm_python: the interpreter of engines.
    """

    tiny: bool
    folder: Path
    cpu: ProcessPoolExecutor
    vllm_python: str = sys.executable

    @property
    def scale(self) -> Scale:
        """Sizes of the model of parts b to d."""
        return TINY if self.tiny else FULL

    def on_cpu(self, function: Callable[..., Any], *arguments: Any) -> Future[bytes]:
        """Start a call in the process that sees no GPU; ``loaded`` reads its result."""
        return self.cpu.submit(_dumped, function, *arguments)


def cpu_process() -> ProcessPoolExecutor:
    """Start a process that sees no GPU."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    pool.submit(os.getpid)  # starts the process, which inherits the variable
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return pool


def _end_with_parent() -> None:
    """End this process when its parent has ended, also if that was killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _dumped(function: Callable[..., Any], *arguments: Any) -> bytes:
    file = io.BytesIO()
    torch.save(function(*arguments), file)
    return file.getvalue()


def loaded(result: Future[bytes]) -> Any:
    """Return the result of ``Session.on_cpu``."""
    return torch.load(io.BytesIO(result.result(300.0)), weights_only=False)


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted differences between two devices.

    Attributes:
        scores: of log-probabilities with equal weights, also between generation and scoring.
        after: of log-probabilities after the updates.
        again: of log-probabilities after the updates, computed twice on one device.
        metrics: of gradient norms and losses, relative to 1 or to the value if it is larger.
        rows: rows of tokens that may differ, of ``ROWS``.
        weights: of parameters after the updates, whose steps are up to 1e-3 each; None if rounding hides steps.
        mean: whether differences of log-probabilities are averaged over tokens; otherwise the largest one counts.
    """

    scores: float
    after: float
    again: float
    metrics: float
    rows: int
    weights: float | None = None
    mean: bool = True

    def difference(self, scores: Tensor, expected: Tensor) -> float:
        """Return the mean or the largest difference of log-probabilities, ``[rows, response]``; 0 is padding."""
        if scores.shape != expected.shape:
            return float("inf")
        differences = (scores.double() - expected.double()).abs()
        return float(differences.sum() / (expected != 0).sum().clamp(min=1) if self.mean else differences.max())


TOLERANCES = {
    # 24 bits of mantissa: sums of a few hundred terms in another order differ by 1e-6 of their size. Adam divides by
    # the gradient's own size, so an update enlarges that. A row of tokens differs if two tokens are nearly as likely.
    "float32": Tolerance(scores=2e-4, after=5e-3, again=2e-3, metrics=2e-3, rows=1, weights=2e-4, mean=False),
    # 11 bits of mantissa: Transformer Engine multiplies float32 matrices in TF32.
    "tf32": Tolerance(scores=5e-3, after=2e-2, again=5e-3, metrics=5e-2, rows=ROWS // 2, weights=2e-3),
    # 8 bits of mantissa: hidden states are rounded after every operation, to 0.4% of their size. A token that is nearly
    # as close to another expert may go there, so single log-probabilities differ by more, and their mean is compared.
    "bfloat16": Tolerance(scores=2e-2, after=0.3, again=2e-2, metrics=0.2, rows=ROWS),
}
"""Tolerances by precision of the arithmetic."""


@dataclass(frozen=True)
class CaseRun:
    """A case of ``ONE_PROCESS`` in a dtype, with an implementation of the layers."""

    case: str
    dtype: str = "float32"
    implementation: str = "local"

    def __str__(self) -> str:
        return f"{self.case} {self.dtype}" + (" TE" if self.implementation != "local" else "")

    def settings(self) -> dict[str, Any]:
        """Return the fields of ActorConfig."""
        sizes = TINY_MODEL | {"transformer_impl": self.implementation}
        rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}
        return ONE_PROCESS[self.case].settings(self.dtype, sizes) | {"rollout": rollout, "ppo_micro_batch_size": 4}

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of its results."""
        uses_tf32 = self.dtype == "float32" and self.implementation == "transformer_engine"
        return TOLERANCES["tf32" if uses_tf32 else self.dtype]


def _batch() -> DataProto:
    columns = batch_columns(ROWS, PROMPT, RESPONSE, TINY_MODEL["vocab_size"])
    return DataProto.from_dict(columns, meta_info=dict(TOKENS))


def run_case(call: Callable[..., Any], save: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Score, generate and train, by the methods of a group or of a worker.

    Args:
        call: calls a method with a batch.
        save: is called after the first update.

    Returns:
        ``scores`` and ``after`` (log-probabilities before and after the updates, ``[rows, response]``), ``greedy`` and
        ``sampled`` (tokens), ``drift`` (the mean difference between the log-probabilities of greedy tokens that
        generation and scoring return), and ``metrics`` of each update.
    """
    batch = _batch()
    columns = prompt_columns(ROWS, PROMPT, TINY_MODEL["vocab_size"])
    prompts = DataProto.from_dict(columns, meta_info=TOKENS | {"do_sample": False})
    greedy = call("generate_sequences", prompts)
    mask = greedy.batch["response_mask"]
    scored = call("compute_log_prob", greedy).batch["old_log_probs"]
    prompts.meta_info = TOKENS | {"top_p": 0.9, "top_k": 50, "n": 2}
    results: dict[str, Any] = {
        "scores": call("compute_log_prob", batch).batch["old_log_probs"],
        "greedy": greedy.batch["responses"],
        "sampled": call("generate_sequences", prompts).batch["responses"],
        "drift": float(((scored - greedy.batch["rollout_log_probs"]) * mask).abs().sum() / mask.sum()),
    }

    def update() -> dict[str, float]:
        metrics = call("update_actor", batch).meta_info["metrics"]
        # A group returns a list with the value of each data-parallel rank, all of them the same.
        return {name: value[0] if isinstance(value, list) else value for name, value in metrics.items()}

    metrics = [update()]
    save()
    metrics += [update() for _ in range(STEPS - 1)]
    return results | {"metrics": metrics, "after": call("compute_log_prob", batch).batch["old_log_probs"]}


def run_in_process(run: CaseRun, folder: Path) -> dict[str, Any]:
    """Return the results of ``run_case`` in this process, and ``weights`` by name; save into ``folder``."""
    with Policy(actor_config(run.settings())) as policy:
        results = run_case(policy.call, lambda: CAN_SAVE and policy.call("save_checkpoint", str(folder / str(run)), 1))
        named = [parameter for chunk in policy.worker.model for parameter in unwrap_model(chunk).named_parameters()]
        return results | {"weights": {name: parameter.detach().float().cpu() for name, parameter in named}}


def continue_case(run: CaseRun, checkpoint: Path) -> Tensor:
    """Load the checkpoint of a run, make the remaining updates, and return the scores: ``after``."""
    with Policy(actor_config(run.settings())) as policy:
        policy.call("load_checkpoint", str(checkpoint))
        for _ in range(STEPS - 1):
            policy.call("update_actor", _batch())
        return policy.scores(_batch())


def parity(session: Session) -> Iterator[Row]:
    """Compare every case with the CPU: both get the same weights, batch and random numbers."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    there = session.folder / "cpu"
    cases = ["dense"] if session.tiny else list(ONE_PROCESS)
    cpu_runs = [CaseRun(case, dtype) for case in cases for dtype in ("float32", "bfloat16")]
    expected = {run: session.on_cpu(run_in_process, run, there) for run in cpu_runs}
    for cpu_run in cpu_runs:
        on_cpu = loaded(expected[cpu_run])
        for run in [replace(cpu_run, implementation=layers) for layers in LAYERS]:
            results = run_in_process(run, session.folder)
            yield from case_rows(run, results, on_cpu)
            if run.case != "dense":
                continue
            if not CAN_SAVE:
                yield skipped(f"checkpoint {run}", "psutil, which Megatron-Core saves with, is not installed")
                continue
            limit = run.tolerance
            scores = [("resumed", continue_case(run, session.folder / str(run)), results["after"], limit.again)]
            scores.append(("from the CPU", continue_case(run, there / str(cpu_run)), on_cpu["after"], limit.after))
            if run == cpu_run:
                back = loaded(session.on_cpu(continue_case, run, session.folder / str(run)))
                scores.append(("to the CPU", back, on_cpu["after"], limit.after))
            advice = "the continued run differs: updates must pass first, then the optimizer's state"
            for how, value, right, largest in scores:
                yield at_most(f"checkpoint {run}, {how}", limit.difference(value, right), largest, advice)


def case_rows(run: CaseRun, results: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[Row]:
    """Compare the results of a run with the expected ones: see ``run_case``.

    Weights are compared if both have a parameter of the name: fused layers of Transformer Engine name norms otherwise.
    """
    tolerance = run.tolerance
    for kind, limit in (("scores", tolerance.scores), ("after", tolerance.after)):
        yield at_most(f"{kind} {run}", tolerance.difference(results[kind], expected[kind]), limit, _ADVICE)
    for kind in ("greedy", "sampled") if tolerance.rows < ROWS else ():
        ours, theirs = results[kind], expected[kind]
        differ = len(theirs) if ours.shape != theirs.shape else int((ours != theirs).any(1).sum())
        yield at_most(f"{kind} rows that differ {run}", differ, tolerance.rows * len(theirs) // ROWS, _ADVICE)
    advice = "generation and scoring disagree on this device: the cache or the attention of generation is wrong"
    yield at_most(f"generation against scoring {run}", results["drift"], tolerance.scores, advice)
    metrics = [
        abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name]))
        for ours, theirs in zip(results["metrics"], expected["metrics"], strict=True)
        for name in theirs
        if not name.endswith("ratio_max")  # of one token
    ]
    yield at_most(f"metrics {run}", _largest(metrics), tolerance.metrics, _ADVICE)
    if "weights" in results and tolerance.weights is not None:
        ours, theirs = results["weights"], expected["weights"]
        weights = [float((ours[name] - theirs[name]).abs().max()) for name in ours.keys() & theirs.keys()]
        yield at_most(f"weights {run}", _largest(weights), tolerance.weights, _ADVICE)


def _largest(values: list[float]) -> float:
    """The largest of the values; NaN if one is NaN, or if there is none."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else float("nan")
