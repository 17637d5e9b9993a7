"""Part d: groups on Ray: two on one GPU, a peer that dies or stops, engines."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
import torch

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import MControllerError
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.config.vllm import VllmConfig
from workers.generate.vllm.interpreter import has_vllm
from workers.gpucheck.ranks import ranks_on_one_gpu
from workers.gpucheck.rows import SKIPPED, Run
from workers.gpucheck.scale import EXPERTS, GB, batch_of, fastest, timed
from workers.parity.cases import prompt_columns
from workers.parity.computed import drift_of
from workers.parity.roles import TOKENS
from workers.weights.transfer.weight_transfer import WeightTransfer

_DEADLINE_S = 20.0
"""[s] A transfer to a lost process fails after this, and its sender must live as long after that."""
_PROMPTS, _DECODED = 32, 128
"""Prompts of an engine, and the most tokens that it generates for one."""


@contextlib.contextmanager
def _group(actor: ActorConfig, role: str, pool: RayResourcePool) -> Iterator[Any]:
    """Start a group with a model; NCCL takes it beside another group on the same GPU."""
    created = RayClassWithInitArgs(ActorRolloutRefWorker, actor, role)
    if pool.max_colocate_count > 1:
        created.update_options({"runtime_env": {"env_vars": ranks_on_one_gpu(role)}})
    with MegatronRayWorkerGroup(pool, created, role, timeout=600.0) as group:
        group.init_model()
        yield group


def check(run: Run) -> None:
    """Start a Ray cluster on this machine, with two slots for processes on each GPU, and run all checks on it."""
    with run.row("ray") as figures:
        figures["gpus"] = count = torch.cuda.device_count()
        ray.init("local", num_cpus=2 * count + 1, num_gpus=count, include_dashboard=False, log_to_driver=False)
    for transport, number in (("cuda_ipc", signal.SIGKILL), ("process_group", signal.SIGSTOP)):
        _transfer(run, transport, number)
    with_experts = replace(EXPERTS, router_replay="rollout")
    _generate(run, "megatron", run.actor)
    _generate(run, "megatron, experts replayed", with_experts)
    if has_vllm(run.vllm_python):
        _generate(run, "vllm", run.actor)
        _generate(run, "vllm, started again", run.actor)
        _generate(run, "vllm, experts replayed", with_experts)
    else:
        run.write(SKIPPED, "vllm", reason=f"{run.vllm_python} has no vllm: pass --vllm-python")
    ray.shutdown()


def _transfer(run: Run, transport: str, number: signal.Signals) -> None:
    """Send weights to a group on the same GPU, then a signal to the process that receives.

    The sender must get an error, and be usable for some time after it.
    """
    actor = run.actor
    other = replace(actor, model=replace(actor.model, seed=actor.model.seed + 1))
    with (
        run.row(f"weights by {transport}, {number.name}", {"until_error_s": 3 * _DEADLINE_S}) as figures,
        RayResourcePool([1], max_colocate_count=2) as pool,
        _group(actor, "actor", pool) as source,
        _group(other, "rollout", pool) as target,
        WeightTransfer(source, target, transport=transport, timeout=_DEADLINE_S) as transfer,
    ):
        for name in ("first", "update"):
            report = transfer.run()  # raises if fingerprints differ
            figures |= {"sent_gb": report.bytes_sent / GB, f"{name}_s": report.seconds}
            source.update_actor(batch_of(actor))
        pid = target.execute_func_rank_zero(os.getpid)
        os.kill(pid, number)
        started = time.monotonic()
        try:
            transfer.run()
        except MControllerError as error:  # of the transfer, or of the dead rank, whichever is noticed first
            figures |= {"reported": str(error).partition("\n")[0][:200], "until_error_s": time.monotonic() - started}
        for _ in range(int(_DEADLINE_S)):  # NCCL's watchdog may end the process
            source.execute_func_rank_zero(_device_copy_gb_per_s)
            time.sleep(1.0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # a stopped process keeps its part of the GPU's memory


def _generate(run: Run, name: str, actor: ActorConfig) -> None:
    """Generate with an engine before and after an update, compare its tokens with scores, and let it sleep.

    Args:
        run: the run.
        name: of the row: the engine, and what is special.
        actor: the policy.
    """
    engine = name.partition(",")[0]
    vllm = VllmConfig(python=run.vllm_python) if engine == "vllm" else VllmConfig()
    length = min(_DECODED, actor.rollout.response_length)
    rollout = replace(actor.rollout, engine=engine, vllm=vllm, response_length=length, verify_weights="fingerprints")
    columns = prompt_columns(_PROMPTS, rollout.prompt_length, actor.model.vocab_size)
    greedy = DataProto.from_dict(columns, meta_info=TOKENS | {"do_sample": False})
    started = time.monotonic()
    # 28 layers round more than the four of part a: 0.018 on an H100
    limits = {"log_prob_difference": 4e-2, "rows_changed_by_sleep": 0}
    with (
        run.row(name, limits) as figures,
        RayResourcePool([1]) as pool,
        _group(replace(actor, rollout=rollout), "actor_rollout", pool) as group,
    ):
        figures["start_s"] = time.monotonic() - started
        trained = group.generate_sequences(greedy)
        trained = trained.union(group.compute_log_prob(trained))
        trained.batch["advantages"] = trained.batch["response_mask"].float()
        trained.meta_info.pop("metrics", None)
        group.update_actor(trained)
        again = group.generate_sequences(greedy)  # gets the new weights, and raises if their fingerprints differ
        metrics = again.meta_info.get("metrics", {})
        figures |= {name: float(torch.tensor(value).max()) for name, value in metrics.items()}
        figures["device_copy_gb_per_s"] = group.execute_func_rank_zero(_device_copy_gb_per_s)
        figures["log_prob_difference"] = drift_of(again, group.compute_log_prob(again))
        figures["sleep_s"], _ = timed(group.offload)
        figures["left_gb"] = group.execute_func_rank_zero(_used_gb)
        figures["wake_s"], after = timed(group.generate_sequences, greedy)
        figures["rows_changed_by_sleep"] = int((after.batch["responses"] != again.batch["responses"]).any(1).sum())


def _used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GB


def _device_copy_gb_per_s() -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds, _ = fastest(torch.empty_like(source).copy_, source)
    return source.nbytes / GB / seconds
