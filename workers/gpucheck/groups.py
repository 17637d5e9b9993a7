"""Part d: groups on Ray: a forked worker, two groups on one GPU, a peer that dies or stops, engines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import MControllerError
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.config.vllm import VllmConfig
from workers.generate.vllm.interpreter import has_vllm
from workers.gpucheck.equality import LIMITS
from workers.gpucheck.ranks import in_one_process, ranks_on_one_gpu
from workers.gpucheck.scale import GB, SIZES, Session, fastest, timed
from workers.memory.without_gpus import without_gpus
from workers.parity.cases import ONE_PROCESS, ROWS, STEPS, batch_columns
from workers.parity.computed import PROMPT, RESPONSE, computed, difference, differences, drift_of
from workers.parity.roles import actor_config
from workers.weights.transfer.weight_transfer import WeightTransfer

_DEADLINE_S = 20.0
"""[s] A transfer to a lost process fails after this, and its sender must live as long after that."""


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Run Ray on this machine, with slots for two groups on each GPU."""
    count = torch.cuda.device_count()
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=2 * count + 1, num_gpus=count, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _group(config: ActorConfig, role: str, pool: RayResourcePool) -> Iterator[Any]:
    """Start a group with a model; NCCL takes it beside another group on the same GPU."""
    created = RayClassWithInitArgs(ActorRolloutRefWorker, config, role)
    if pool.max_colocate_count > 1:
        created.update_options({"runtime_env": {"env_vars": ranks_on_one_gpu(role)}})
    with MegatronRayWorkerGroup(pool, created, role, timeout=600.0) as group:
        group.init_model()
        yield group


def worker(session: Session) -> None:
    """Compare a group, in tensor parallelism if there are two GPUs, with the CPU."""
    ranks, case = min(2, torch.cuda.device_count()), ONE_PROCESS["dense"]
    config = actor_config(case.settings("float32", SIZES) | {"parallel": {"tp": ranks}})
    batch = DataProto.from_dict(batch_columns(ROWS, PROMPT, RESPONSE, SIZES["vocab_size"]))
    limits = {name: LIMITS["float32"][name] for name in ("scores", "after")}
    with session.report.row("scores and updates of a group", limits) as figures:
        expected = without_gpus(in_one_process)(computed, [(case, "float32", SIZES)])
        with RayResourcePool([ranks]) as pool, _group(config, "actor", pool) as group:
            results = {"dp": 0, "scores": _scores(group, batch)}
            for _ in range(STEPS):
                group.update_actor(batch)
            results["after"] = _scores(group, batch)
        figures |= differences(expected, [results], limits)


def _scores(group: Any, batch: DataProto) -> torch.Tensor:
    """Return log-probabilities, ``[rows, response]``."""
    return group.compute_log_prob(batch).tensors()["old_log_probs"]


def transfers(session: Session) -> None:
    """Send weights to a group on the same GPU, hand its memory over, and kill or stop the process that receives."""
    report, scale, batch = session.report, session.scale, session.scale.batch()
    for transport, number in (("cuda_ipc", signal.SIGKILL), ("process_group", signal.SIGSTOP)):
        with (
            RayResourcePool([1], max_colocate_count=2) as pool,
            _group(scale.config(), "actor", pool) as actor,
            _group(scale.config(seed=2, response_length=scale.decoded), "rollout", pool) as rollout,
        ):
            with WeightTransfer(actor, rollout, transport=transport, timeout=120) as transfer:
                _send(session, f"weights by {transport}", transfer)
                actor.update_actor(batch)
                _send(session, f"updated weights by {transport}", transfer)
            with report.row(f"scores after a hand-over by {transport}", {"difference": 0.0}) as figures:
                before = _scores(actor, batch)
                figures["offload_s"], freed = timed(lambda: sum(actor.offload()))
                figures["freed_gb"] = freed / GB
                figures["generate_s"], _ = timed(rollout.generate_sequences, scale.prompts())
                rollout.offload()
                figures["score_with_reload_s"], after = timed(_scores, actor, batch)
                figures["difference"] = difference(after, before)
            transfer = WeightTransfer(actor, rollout, transport=transport, timeout=_DEADLINE_S)
            _lose_peer(session, f"peer lost by {transport}, {number.name}", transfer, number)


def _send(session: Session, name: str, transfer: WeightTransfer) -> None:
    """Send the weights; the transfer raises if their fingerprints differ."""
    with session.report.row(name) as figures:
        report = transfer.run()
        sent = report.bytes_sent / GB
        figures |= {"transport": report.transport, "seconds": report.seconds}
        figures |= {"sent_gb": sent, "gb_per_s": sent / report.seconds}


def _lose_peer(session: Session, name: str, transfer: WeightTransfer, number: signal.Signals) -> None:
    """Send a signal to the receiving process; the sender must get an error, and be usable for some time after it."""
    pid = transfer.target.execute_func_rank_zero(os.getpid)
    with session.report.row(name, {"until_error_s": 3 * _DEADLINE_S}) as figures:
        os.kill(pid, number)
        started = time.monotonic()
        try:
            transfer.run()
        except MControllerError as error:  # of the transfer, or of the dead rank, whichever is noticed first
            figures |= {"reported": str(error).partition("\n")[0][:200], "until_error_s": time.monotonic() - started}
        watched_until = time.monotonic() + _DEADLINE_S
        while time.monotonic() < watched_until:  # NCCL's watchdog may end the process
            transfer.source.execute_func_rank_zero(_use_gpu)
            time.sleep(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # a stopped process keeps its part of the GPU's memory


def _use_gpu() -> None:
    torch.ones(64, device="cuda").sum().item()


def engines(session: Session) -> None:
    """Generate beside a loaded actor, with Megatron's layers and with vLLM."""
    for engine in ("megatron", "vllm"):
        if engine == "vllm" and not has_vllm(session.vllm_python):
            session.report.skip("vllm", f"{session.vllm_python} has no vllm: pass --vllm-python")
            continue
        settings: dict[str, Any] = {
            "engine": engine,
            "response_length": session.scale.decoded,
            "verify_weights": "fingerprints",
            "vllm": VllmConfig(python=session.vllm_python),
        }
        started = time.monotonic()
        with RayResourcePool([1]) as pool, _group(session.scale.config(**settings), "actor_rollout", pool) as policy:
            with session.report.row(f"{engine}: start") as figures:
                figures["seconds"] = time.monotonic() - started
            _update(session, engine, policy)
            with session.report.row(f"{engine}: sampled tokens") as figures:
                seconds, sampled = fastest(policy.generate_sequences, session.scale.prompts())
                figures["tokens_per_s"] = int(sampled.batch["response_mask"].sum()) / seconds


def _update(session: Session, engine: str, policy: Any) -> None:
    """Update the policy, and compare what the engine generates with its scores, and after it slept."""
    report, greedy = session.report, session.scale.prompts(do_sample=False)
    trained = policy.generate_sequences(greedy)
    trained = trained.union(policy.compute_log_prob(trained))
    trained.batch["advantages"] = trained.batch["response_mask"].float()
    trained.meta_info.pop("metrics", None)
    policy.update_actor(trained)
    again = policy.generate_sequences(greedy)  # gets the new weights, and raises if their fingerprints differ
    metrics = again.meta_info.get("metrics", {})
    if "rollout/update_bytes" in metrics:
        with report.row(f"{engine}: update") as figures:
            seconds, sent = (_first(metrics[f"rollout/update_{unit}"]) for unit in ("seconds", "bytes"))
            figures |= {"sent_gb": sent / GB, "seconds": seconds, "gb_per_s": sent / GB / seconds}
            figures["device_copy_gb_per_s"] = policy.execute_func_rank_zero(_device_copy_gb_per_s)
    # 28 layers round more than the four of part a: 0.018 on an H100
    with report.row(f"{engine}: log-probabilities after an update", {"difference": 4e-2}) as figures:
        figures["difference"] = drift_of(again, policy.compute_log_prob(again))
    with report.row(f"{engine}: rows that differ after sleep", {"rows": 0}) as figures:
        policy.offload()
        figures["wake_s"], after = timed(policy.generate_sequences, greedy)
        figures["rows"] = int((after.batch["responses"] != again.batch["responses"]).any(1).sum())


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def _device_copy_gb_per_s() -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds, _ = fastest(torch.empty_like(source).copy_, source)
    return source.nbytes / GB / seconds


CHECKS = (worker, transfers, engines)
"""The checks of the part, which need ``local_ray``."""
