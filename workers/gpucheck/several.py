"""Checks with several ranks: collectives, layouts, and a group of workers on Ray."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.gpucheck.course import UPDATES, Case, Outcome
from workers.gpucheck.policy import MODELS, actor_config, ppo_columns
from workers.gpucheck.ranks import layouts_of, run_processes
from workers.gpucheck.rows import Result, Row, at_most, compared
from workers.gpucheck.session import CHECKS, Session
from workers.gpucheck.tolerances import TOLERANCES, largest_difference

__all__ = ["bandwidth_rows", "group_rows", "layout_rows"]

_DENSE = Case("dense")


@CHECKS.register("collectives")
def collectives(session: Session) -> Iterator[Row]:
    """Sum a tensor over all GPUs of this machine, and measure the bandwidth."""
    if session.ranks < 2:
        yield Row("collectives", "", result=Result.SKIPPED, note="there is one GPU")
        return
    results = run_processes(session.folder / "ranks", "collectives", session.device.type, session.ranks)
    yield from bandwidth_rows(results)


def bandwidth_rows(results: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    """Yield the rows of an all-reduce; the bus bandwidth is ``2 (n - 1) / n x bytes / seconds``, as in nccl-tests.

    Args:
        results: ``error``, ``bytes`` and ``seconds`` of every rank.
    """
    count = len(results)
    error = float(torch.tensor([result["error"] for result in results]).max())
    yield at_most(
        f"collectives: all-reduce of {count} ranks",
        error,
        0.0,
        reference="sums of integers",
        note="set NCCL_DEBUG=INFO and repeat; NCCL_P2P_DISABLE=1 shows whether transfers between GPUs are wrong",
    )
    slowest = max(result["seconds"] for result in results)
    bandwidth = 2 * (count - 1) / count * results[0]["bytes"] / slowest / 1e9
    yield Row("collectives: bus bandwidth", f"{bandwidth:.1f} GB/s", f"{results[0]['bytes'] / 2**20:.0f} MiB")


@CHECKS.register("layouts")
def layouts(session: Session) -> Iterator[Row]:
    """Compare scores, tokens and updates over tp, pp, dp and cp with one process on the CPU."""
    if session.ranks < 2:
        yield Row("layouts", "", result=Result.SKIPPED, note="there is one GPU")
        return
    world_size = 4 if session.ranks >= 4 else 2
    results = run_processes(session.folder / "ranks", "layouts", session.device.type, world_size)
    for name in layouts_of(world_size):
        yield from layout_rows(name, [result[name] for result in results], session.reference(_DENSE))


def layout_rows(name: str, results: Sequence[Mapping[str, Any]], reference: Outcome) -> Iterator[Row]:
    """Yield the rows of one layout.

    Args:
        name: of the layout.
        results: of all ranks: ``shard`` (the index on the dp axis if the rank returns), and the tensors of its rows.
        reference: of one process.
    """
    returning = sorted(
        (result for result in results if result["shard"] is not None), key=lambda result: result["shard"]
    )
    tolerance = TOLERANCES[_DENSE.precision]
    for kind, limit in (("scores", tolerance.scores), ("after", tolerance.after)):
        joined = torch.cat([result[kind] for result in returning])
        difference = largest_difference(joined, getattr(reference, kind))
        help_text = "this axis computes something else here: check collectives first"
        yield at_most(f"layouts: {name} {kind}", difference, limit, reference="one process, CPU", note=help_text)
    if returning[0]["greedy"] is not None:
        tokens = torch.cat([result["greedy"] for result in returning])
        yield _token_row(f"layouts: {name} greedy", tokens, reference.greedy, tolerance.rows)


def _token_row(name: str, value: Tensor, reference: Tensor, allowed: int) -> Row:
    equal = int((value == reference).all(1).sum()) if value.shape == reference.shape else 0
    text = f"{equal} of {len(reference)} rows equal"
    note = "generation differs from one process: check scores and tokens first"
    return compared(name, equal >= len(reference) - allowed, text, "one process, CPU", f"{allowed} rows", note=note)


@CHECKS.register("ray")
def ray_group(session: Session) -> Iterator[Row]:
    """Compare scores, tokens and updates of a group of workers on Ray with one process on the CPU."""
    missing = [name for name in ("ray", "tensordict") if not _importable(name)]
    if missing:
        yield Row("ray", "", result=Result.SKIPPED, note=f"{' and '.join(missing)} cannot be imported")
        return
    yield from group_rows(_of_group(session), session.reference(_DENSE))


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _of_group(session: Session) -> dict[str, Tensor]:
    """Start Ray and a group of one or two ranks; return its results."""
    import ray

    from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
    from workers.actor import ActorRolloutRefWorker

    count = min(2, session.ranks)
    config = actor_config(MODELS["dense"] | {"transformer_impl": "local"}, parallel={"tp": count})
    gpus = torch.cuda.device_count() if session.on_gpu else 0
    ray.init(
        address="local",
        num_cpus=count + 1,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        batch = DataProto.from_dict(ppo_columns(), meta_info={"eos_token_id": 1, "pad_token_id": 0})
        length = config.rollout.prompt_length
        prompts = DataProto.from_dict(
            {name: ppo_columns()[name][:, :length] for name in ("input_ids", "attention_mask")},
            meta_info=batch.meta_info | {"do_sample": False},
        )
        pool = RayResourcePool([count], use_gpu=session.on_gpu)
        init = RayClassWithInitArgs(ActorRolloutRefWorker, config, "actor_rollout")
        with MegatronRayWorkerGroup(pool, init, "gpucheck", timeout=120.0) as group:
            group.init_model()
            results = {"scores": group.compute_log_prob(batch).tensors()["old_log_probs"]}
            results["greedy"] = group.generate_sequences(prompts).tensors()["responses"]
            for _ in range(UPDATES):
                group.update_actor(batch)
            results["after"] = group.compute_log_prob(batch).tensors()["old_log_probs"]
    finally:
        ray.shutdown()
    return results


def group_rows(results: Mapping[str, Tensor], reference: Outcome) -> Iterator[Row]:
    """Yield the rows of a group on Ray: ``scores``, ``greedy`` and ``after`` against one process."""
    tolerance = TOLERANCES[_DENSE.precision]
    for kind, limit in (("scores", tolerance.scores), ("after", tolerance.after)):
        difference = largest_difference(results[kind], getattr(reference, kind))
        help_text = "run python -m mcontroller doctor; then check layouts"
        yield at_most(f"ray: group's {kind}", difference, limit, reference="one process, CPU", note=help_text)
    yield _token_row("ray: group's greedy tokens", results["greedy"], reference.greedy, tolerance.rows)
