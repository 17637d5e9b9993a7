"""Part d: groups on Ray: two on one GPU, a peer that dies or stops, engines."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mcontroller import MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import MControllerError
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.config.vllm import VllmConfig
from workers.generate.vllm.interpreter import has_vllm
from workers.gpucheck.ranks import ranks_on_one_gpu
from workers.gpucheck.scale import EXPERTS, GB, Session, batch_of, fastest, prompts_of, timed
from workers.parity.computed import drift_of
from workers.weights.transfer.weight_transfer import WeightTransfer

_DEADLINE_S = 20.0
"""[s] A transfer to a lost process fails after this, and its sender must live as long after that."""
_DECODED = 128
"""The most tokens that are generated for a prompt."""


@contextlib.contextmanager
def _group(actor: ActorConfig, role: str, pool: RayResourcePool) -> Iterator[Any]:
    """Start a group with a model; NCCL takes it beside another group on the same GPU."""
    created = RayClassWithInitArgs(ActorRolloutRefWorker, actor, role)
    if pool.max_colocate_count > 1:
        created.update_options({"runtime_env": {"env_vars": ranks_on_one_gpu(role)}})
    with MegatronRayWorkerGroup(pool, created, role, timeout=600.0) as group:
        group.init_model()
        yield group


def transfers(session: Session) -> None:
    """Send weights to a group on the same GPU, and kill or stop the process that receives."""
    actor = session.actor
    other = replace(actor, model=replace(actor.model, seed=actor.model.seed + 1))
    for transport, number in (("cuda_ipc", signal.SIGKILL), ("process_group", signal.SIGSTOP)):
        with (
            RayResourcePool([1], max_colocate_count=2) as pool,
            _group(actor, "actor", pool) as source,
            _group(other, "rollout", pool) as target,
            WeightTransfer(source, target, transport=transport, timeout=_DEADLINE_S) as transfer,
        ):
            for name in ("weights", "updated weights"):
                with session.report.row(f"{name} by {transport}") as figures:
                    report = transfer.run()  # raises if fingerprints differ
                    sent = report.bytes_sent / GB
                    figures |= {"sent_gb": sent, "seconds": report.seconds, "gb_per_s": sent / report.seconds}
                source.update_actor(batch_of(actor))
            _lose_peer(session, f"peer lost by {transport}, {number.name}", transfer, number)


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
            transfer.source.execute_func_rank_zero(_device_copy_gb_per_s)
            time.sleep(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # a stopped process keeps its part of the GPU's memory


def engines(session: Session) -> None:
    """Generate beside a loaded actor, with Megatron's layers and with vLLM, which starts a second time."""
    with_experts = replace(EXPERTS, router_replay="rollout")
    _generate(session, "megatron", session.actor)
    _generate(session, "megatron, experts replayed", with_experts)
    if not has_vllm(session.vllm_python):
        session.report.skip("vllm", f"{session.vllm_python} has no vllm: pass --vllm-python")
        return
    _generate(session, "vllm", session.actor)
    _generate(session, "vllm, started again", session.actor)
    _generate(session, "vllm, experts replayed", with_experts)


def _generate(session: Session, name: str, actor: ActorConfig) -> None:
    """Generate with an engine before and after an update, compare its tokens with scores, and let it sleep.

    Args:
        session: the run.
        name: of the rows: the engine, and what is special.
        actor: the policy.
    """
    engine, vllm = name.partition(",")[0], VllmConfig(python=session.vllm_python)
    length = min(_DECODED, actor.rollout.response_length)
    rollout = replace(actor.rollout, engine=engine, vllm=vllm, response_length=length, verify_weights="fingerprints")
    row, greedy, started = session.report.row, prompts_of(actor, do_sample=False), time.monotonic()
    policy = replace(actor, rollout=rollout)
    with RayResourcePool([1]) as pool, _group(policy, "actor_rollout", pool) as group:
        with row(f"{name}: start") as figures:
            figures["seconds"] = time.monotonic() - started
        trained = group.generate_sequences(greedy)
        trained = trained.union(group.compute_log_prob(trained))
        trained.batch["advantages"] = trained.batch["response_mask"].float()
        trained.meta_info.pop("metrics", None)
        group.update_actor(trained)
        again = group.generate_sequences(greedy)  # gets the new weights, and raises if their fingerprints differ
        metrics = {name: float(torch.tensor(value).max()) for name, value in again.meta_info.get("metrics", {}).items()}
        if "rollout/update_bytes" in metrics:
            with row(f"{name}: update") as figures:
                seconds, sent = metrics["rollout/update_seconds"], metrics["rollout/update_bytes"] / GB
                figures |= {"sent_gb": sent, "seconds": seconds, "gb_per_s": sent / seconds}
                figures["device_copy_gb_per_s"] = group.execute_func_rank_zero(_device_copy_gb_per_s)
        # 28 layers round more than the four of part a: 0.018 on an H100
        with row(f"{name}: log-probabilities after an update", {"difference": 4e-2}) as figures:
            figures["difference"] = drift_of(again, group.compute_log_prob(again))
        with row(f"{name}: rows that differ after sleep", {"rows": 0}) as figures:
            figures["sleep_s"], _ = timed(group.offload)
            figures["left_gb"] = group.execute_func_rank_zero(_used_gb)
            figures["wake_s"], after = timed(group.generate_sequences, greedy)
            figures["rows"] = int((after.batch["responses"] != again.batch["responses"]).any(1).sum())
        with row(f"{name}: sampled tokens") as figures:
            seconds, sampled = fastest(group.generate_sequences, prompts_of(actor))
            figures["tokens_per_s"] = int(sampled.batch["response_mask"].sum()) / seconds


def _device_copy_gb_per_s() -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds, _ = fastest(torch.empty_like(source).copy_, source)
    return source.nbytes / GB / seconds


def _used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GB
