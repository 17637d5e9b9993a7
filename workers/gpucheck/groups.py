"""Part d: groups on Ray: a forked worker, two groups on one GPU, engines, and NCCL to a peer that stops.

The module imports Ray and tensordict, which the other parts do without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import ray
import torch
from torch import Tensor

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import MControllerError
from mcontroller.ray.warm_start import exits
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.config.vllm import VllmConfig
from workers.gpucheck.case_run import BATCH, CaseRun, Session, run_case
from workers.gpucheck.cases import STEPS, prompt_columns
from workers.gpucheck.equality import TOLERANCES, case_rows
from workers.gpucheck.policy import PROMPT, TOKENS, actor_config, full_rows, timed
from workers.gpucheck.rows import Figure, Row, at_most, judged, measured, skipped
from workers.weights.transfer.weight_transfer import WeightTransfer

_GB = 2**30


@contextlib.contextmanager
def _group(
    config: ActorConfig, role: str, *, pool: RayResourcePool | None = None, ranks: int = 1
) -> Iterator[MegatronRayWorkerGroup]:
    """Start a group, in a new pool unless one is given."""
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(RayResourcePool([ranks]))
        created = RayClassWithInitArgs(ActorRolloutRefWorker, config, role)
        started = stack.enter_context(MegatronRayWorkerGroup(pool, created, role, timeout=600.0))
        started.init_model()
        yield started


def local_ray() -> Iterator[Row]:
    """Start Ray on this machine, with slots for two groups on each GPU."""
    count = torch.cuda.device_count()
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    seconds, _ = timed(lambda: ray.init("local", num_cpus=2 * count + 1, num_gpus=count, **options))
    yield measured("Ray", version=ray.__version__, start_s=seconds)


def group(session: Session) -> Iterator[Row]:
    """Look at the process of a worker, compare its results with the CPU's, and look for what is left of it."""
    ranks = min(2, torch.cuda.device_count())
    run = CaseRun("dense")
    expected = session.cpu.submit(run_case, run, session.folder / "group")
    before, listed = torch.cuda.mem_get_info()[0], _on_gpus()
    config = actor_config(run.settings() | {"parallel": {"tp": ranks}})
    with _group(config, "actor_rollout", ranks=ranks) as started:
        found = started.execute_func_rank_zero(_probe)
        advice = "start the group with RayResourcePool(warm_start=False), and report the row"
        yield judged("forked worker computes on CUDA", found["right"] and found["forked"], "both", advice, **found)
        expected_value = "1" if ranks > 1 and torch.cuda.get_device_capability() < (10, 0) else found["connections"]
        advice = "set CUDA_DEVICE_MAX_CONNECTIONS=1 in runtime_env"
        yield judged("variables", found["connections"] == expected_value, expected_value, advice, **found)
        advice = "Ray has other GPUs than the group: see docs/gpu.md, 'The device of a worker'"
        yield judged("visible GPUs", found["gpus"] == ranks, f"{ranks}", advice, **found)
        yield from case_rows(run, _course_of(started), expected())
    advice = "a process of the group still has memory: nvidia-smi lists it"
    yield _waited(
        "GPU bytes left after shutdown, GB", lambda: (before - torch.cuda.mem_get_info()[0]) / _GB, 0.1, advice
    )
    if listed is None:
        yield skipped("processes left in nvidia-smi", "nvidia-smi is not installed")
    else:
        yield _waited("processes left in nvidia-smi", lambda: len((_on_gpus() or set()) - listed), 0, advice)


def _probe() -> dict[str, Any]:
    """Compute on the GPU of a worker, and return what its process is like."""
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    return {
        "right": bool((product == 64).all()),
        "forked": exits.record_of_this_process() is not None,
        "gpus": torch.cuda.device_count(),
        "device": torch.cuda.current_device(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "not set"),
    }


def _course_of(started: MegatronRayWorkerGroup) -> dict[str, Tensor]:
    """The results of ``run_case`` that a group returns."""
    batch = DataProto.from_dict(BATCH, meta_info=TOKENS)
    prompts = {name: BATCH[name][:, :PROMPT] for name in ("input_ids", "attention_mask")}
    greedy = DataProto.from_dict(prompts, meta_info=TOKENS | {"do_sample": False})
    results = {"scores": started.compute_log_prob(batch).tensors()["old_log_probs"]}
    results["greedy"] = started.generate_sequences(greedy).tensors()["responses"]
    for _ in range(STEPS):
        started.update_actor(batch)
    return results | {"after": started.compute_log_prob(batch).tensors()["old_log_probs"]}


def _on_gpus() -> set[str] | None:
    """The processes that nvidia-smi lists; None if it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


def _waited(name: str, value: Callable[[], float], limit: float, advice: str) -> Row:
    """The row of a value that has 10 seconds to become small enough."""
    deadline = time.monotonic() + 10
    while value() > limit and time.monotonic() < deadline:
        time.sleep(0.1)
    return at_most(name, value(), limit, advice)


def colocated(session: Session) -> Iterator[Row]:
    """Send weights to a group on the same GPU, hand its memory over, and kill the group that receives."""
    scale, layers = session.scale, session.implementation
    batch = DataProto.from_dict(_full(session), meta_info=TOKENS)
    with (
        RayResourcePool([1], max_colocate_count=2) as pool,
        _group(scale.config(layers, seed=1), "actor", pool=pool) as actor,
    ):
        actor.update_actor(batch)  # from now on, cuBLAS keeps its workspaces
        actor.offload(["grads", "optimizer"])
        held = actor.execute_func_rank_zero(torch.cuda.memory_allocated)
        rollout_config = scale.config(layers, seed=2, rollout={"response_length": scale.decoded})
        with _group(rollout_config, "rollout", pool=pool) as rollout:
            transfer = WeightTransfer(actor, rollout, timeout=120)
            yield _sent(transfer, "initial weights", "cuda_ipc")
            actor.update_actor(batch)
            sent = _sent(transfer, "updated weights", "cuda_ipc")
            yield sent
            before = actor.compute_log_prob(batch).tensors()["old_log_probs"]
            out, freed = timed(lambda: sum(actor.offload()))
            generating, _ = timed(lambda: rollout.generate_sequences(_prompts(session)))
            rollout.offload()
            back, after = timed(lambda: actor.compute_log_prob(batch).tensors()["old_log_probs"])
            difference, figures = float((after - before).abs().max()), {"offload_s": out, "freed_gb": freed / _GB}
            figures |= {"generate_s": generating, "score_with_reload_s": back}
            yield at_most("hand-over: scores that differ", difference, 0.0, "weights changed on their way", **figures)
            actor.offload(["grads", "optimizer"])
            yield _of_lost_peer("receiver killed", transfer, actor, rollout, signal.SIGKILL, 0.0)
            left = actor.execute_func_rank_zero(torch.cuda.memory_allocated) - held
            advice = "the sender keeps its buckets: after a rollout that died, restart the actor's group too"
            limit = float(sent.figures["buffer_gb"]) / 2
            yield at_most("bytes kept after a receiver's death, GB", left / _GB, limit, advice)


def _sent(transfer: WeightTransfer, what: str, transport: str) -> Row:
    """Send the weights; the transfer raises if their fingerprints differ."""
    report = transfer.run()
    figures: dict[str, Figure] = {"transport": report.transport, "seconds": report.seconds}
    figures |= {"sent_gb": report.bytes_sent / _GB, "buffer_gb": report.buffer_bytes / _GB}
    figures |= {"gb_per_s": report.bytes_sent / report.seconds / _GB, "verify_s": report.verify_seconds or 0.0}
    advice = "set no expandable_segments in PYTORCH_CUDA_ALLOC_CONF: docs/gpu.md, 'Weights between colocated groups'"
    return judged(what, report.transport == transport, f"all, by {transport}", advice, **figures)


def _of_lost_peer(
    name: str, transfer: WeightTransfer, source: Any, target: Any, number: signal.Signals, watched_s: float
) -> Row:
    """Send a signal to the receiving process; the sender must get an error, and be usable for some time after it."""
    os.kill(target.execute_func_rank_zero(os.getpid), number)
    started = time.monotonic()
    try:
        transfer.run()
        error = "none"
    except MControllerError as raised:  # of the transfer, or of the dead rank, whichever is noticed first
        error = str(raised).partition("\n")[0][:200]
    seconds = time.monotonic() - started
    try:
        while time.monotonic() < started + seconds + watched_s:
            source.execute_func_rank_zero(os.getpid)
            time.sleep(min(1.0, watched_s))
        source.execute_func_rank_zero(_probe)
        survived = True
    except MControllerError as died:
        error, survived = f"{error}; then {died}"[:400], False
    advice = "the sender died, or got no error: do not use this transport between groups that may lose a peer"
    passed = survived and error != "none"
    return judged(name, passed, "an error, and the sender lives", advice, error=error, until_error_s=seconds)


def engines(session: Session) -> Iterator[Row]:
    """Generate beside a loaded actor, with Megatron's layers and with vLLM, whose samples have seeds or none."""
    yield from _engine(session, "megatron")
    if find_spec("vllm") is None:
        yield skipped("vllm", "vllm is not installed")
        return
    for seeds in (False, True):
        yield from _engine(session, "vllm", seeds=seeds)


def _engine(session: Session, engine: str, **settings: Any) -> Iterator[Row]:
    rollout: dict[str, Any] = {
        "engine": engine,
        "response_length": session.scale.decoded,
        "verify_weights": "fingerprints",
    }
    rollout["vllm"] = VllmConfig(**settings)
    engine = " ".join([engine, *(f"{name}={value}" for name, value in settings.items())])
    config = session.scale.config(session.implementation, rollout=rollout)
    started = time.monotonic()
    with _group(config, "actor_rollout") as policy:
        yield measured(f"{engine}: start beside an actor", start_s=time.monotonic() - started)
        greedy = _prompts(session, do_sample=False)
        first = policy.generate_sequences(greedy)
        trained = first.union(policy.compute_log_prob(first))
        trained.batch["advantages"] = trained.batch["response_mask"].float()
        trained.meta_info.pop("metrics", None)
        policy.update_actor(trained)
        again = policy.generate_sequences(greedy)  # gets the new weights, and raises if their fingerprints differ
        metrics = {name: str(value) for name, value in again.meta_info.get("metrics", {}).items()}
        yield measured(f"{engine}: update, equal fingerprints", **metrics)
        rescored = policy.compute_log_prob(again).tensors()["old_log_probs"]
        mask = again.batch["response_mask"]
        drift = float(((rescored - again.batch["rollout_log_probs"]) * mask).abs().sum() / mask.sum())
        advice = "the engine computes other log-probabilities than the policy"
        limit = 2 * TOLERANCES["bfloat16"].scores  # 28 layers round more than part a's two: 0.018 on an H100
        yield at_most(f"{engine}: log-probabilities", drift, limit, advice)
        asleep, freed = timed(lambda: sum(policy.offload()))
        awake, after = timed(lambda: policy.generate_sequences(greedy))
        differ = int((after.batch["responses"] != again.batch["responses"]).any(1).sum())
        figures = {"sleep_s": asleep, "freed_gb": freed / _GB, "wake_and_generate_s": awake}
        # Kernels choose other sums for another batch, but this is the same batch.
        yield at_most(f"{engine}: rows that differ after sleep", differ, 0, "the engine lost its weights", **figures)
        seconds, generated = timed(lambda: policy.generate_sequences(_prompts(session)))
        tokens = int(generated.batch["response_mask"].sum())
        yield measured(f"{engine}: sampled tokens", tokens_per_s=tokens / seconds)


def nccl(session: Session) -> Iterator[Row]:
    """Send weights over NCCL to a group on another GPU, and stop the process that receives."""
    if torch.cuda.device_count() < 2:
        yield skipped("NCCL to a stopped peer", "there is one GPU")
        return
    scale, layers = session.scale, session.implementation
    with (
        _group(scale.config(layers, seed=1), "actor") as actor,
        _group(scale.config(layers, seed=2), "rollout") as rollout,
    ):
        with WeightTransfer(actor, rollout, transport="process_group", timeout=120) as transfer:
            yield _sent(transfer, "weights over NCCL", "process_group")
        transfer = WeightTransfer(actor, rollout, transport="process_group", timeout=scale.stopped_s)
        pid = rollout.execute_func_rank_zero(os.getpid)
        try:
            yield _of_lost_peer("NCCL to a stopped peer", transfer, actor, rollout, signal.SIGSTOP, scale.stopped_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _full(session: Session) -> dict[str, Tensor]:
    return full_rows(session.scale, [session.scale.prompt + session.scale.response] * 2)


def _prompts(session: Session, **settings: Any) -> DataProto:
    scale = session.scale
    columns = prompt_columns(scale.rows, scale.prompt, scale.model["vocab_size"])
    return DataProto.from_dict(columns, meta_info=TOKENS | settings)
