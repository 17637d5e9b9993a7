"""Part d: groups on Ray: a forked worker, two groups on one GPU, engines, and NCCL to a peer that stops."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from mcontroller.errors import MControllerError
from mcontroller.ray.warm_start import exits
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.config.vllm import VllmConfig
from workers.generate.vllm.interpreter import has_vllm, interpreter_variables
from workers.generate.vllm.start import engine_arguments, engine_environment, policy_folder
from workers.gpucheck.equality import LAYERS, LIMITS, SIZES, compared
from workers.gpucheck.ranks import ranks_on_one_gpu, results_of
from workers.gpucheck.rows import Figure, Row
from workers.gpucheck.scale import GB, Session, fastest, timed
from workers.memory.without_gpus import without_gpus
from workers.parity.cases import ONE_PROCESS, ROWS, STEPS, batch_columns
from workers.parity.computed import PROMPT, RESPONSE, computed, difference, drift_of
from workers.parity.roles import actor_config
from workers.weights.transfer.weight_transfer import WeightTransfer


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
def _group(
    config: ActorConfig, role: str, pool: RayResourcePool, variables: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Start a group with a model, with these variables of the environment."""
    created = RayClassWithInitArgs(ActorRolloutRefWorker, config, role)
    if variables:
        created.update_options({"runtime_env": {"env_vars": dict(variables)}})
    with MegatronRayWorkerGroup(pool, created, role, timeout=600.0) as group:
        group.init_model()
        yield group


def worker(session: Session) -> Iterator[Row]:
    """Look at the process of a worker, compare its results with the CPU's, and look for what is left of it."""
    ranks, case = min(2, torch.cuda.device_count()), ONE_PROCESS["dense"]
    [expected] = without_gpus(results_of)([(computed, case, "float32", SIZES)])
    free = torch.cuda.mem_get_info()[0]
    config = actor_config(case.settings("float32", SIZES) | {"parallel": {"tp": ranks}})
    with RayResourcePool([ranks]) as pool, _group(config, "actor", pool) as group:
        needed: dict[str, Figure] = {"computes": "True", "forked": "True", "gpus": ranks}
        if ranks > 1 and torch.cuda.get_device_capability() < (10, 0):
            needed["connections"] = "1"
        yield Row("variables", group.execute_func_rank_zero(_probe), needed)
        batch = DataProto.from_dict(batch_columns(ROWS, PROMPT, RESPONSE, SIZES["vocab_size"]))
        results = {"dp": 0, "scores": _scores(group, batch)}
        for _ in range(STEPS):
            group.update_actor(batch)
        results["after"] = _scores(group, batch)
    limits = {name: LIMITS["float32"][name] for name in ("scores", "after")}
    yield compared("scores and updates of a group", expected, [results], limits)
    deadline = time.monotonic() + 10
    while (left := (free - torch.cuda.mem_get_info()[0]) / GB) > 0.1 and time.monotonic() < deadline:
        time.sleep(0.1)
    yield Row("GPU memory after shutdown", {"left_gb": left}, {"left_gb": 0.1})


def _probe() -> dict[str, Any]:
    """Compute on the GPU of a worker, and return what its process is like."""
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    return {
        "computes": str(bool((product == 64).all())),
        "forked": str(exits.record_of_this_process() is not None),
        "gpus": torch.cuda.device_count(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "not set"),
    }


def _scores(group: Any, batch: DataProto) -> torch.Tensor:
    """Return log-probabilities, ``[rows, response]``."""
    return group.compute_log_prob(batch).tensors()["old_log_probs"]


@contextlib.contextmanager
def _actor_and_rollout(session: Session, *, over_nccl: bool) -> Iterator[tuple[Any, Any]]:
    """Start an actor, and a rollout with other weights: on one GPU, but on two over NCCL if there are two."""
    apart = over_nccl and torch.cuda.device_count() > 1
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(RayResourcePool([1], max_colocate_count=1 if apart else 2))
        other = stack.enter_context(RayResourcePool([1])) if apart else pool

        def started(role: str, pool: RayResourcePool, seed: int, **rollout: Any) -> Any:
            config = session.scale.config(LAYERS[-1], seed=seed, **rollout)
            variables = ranks_on_one_gpu(role) if over_nccl and not apart else {}
            return stack.enter_context(_group(config, role, pool, variables))

        yield started("actor", pool, 1), started("rollout", other, 2, response_length=session.scale.decoded)


def colocated(session: Session) -> Iterator[Row]:
    """Send weights to a group on the same GPU, hand its memory over, and kill the group that receives."""
    scale, batch = session.scale, session.scale.batch()
    with _actor_and_rollout(session, over_nccl=False) as (actor, rollout):
        transfer = WeightTransfer(actor, rollout, timeout=120)
        yield _sent("initial weights", transfer, "cuda_ipc")
        actor.update_actor(batch)
        yield _sent("updated weights", transfer, "cuda_ipc")
        before = _scores(actor, batch)
        away, freed = timed(lambda: sum(actor.offload()))
        generating, _ = timed(rollout.generate_sequences, scale.prompts())
        rollout.offload()
        back, after = timed(_scores, actor, batch)
        figures = {"offload_s": away, "freed_gb": freed / GB, "generate_s": generating, "score_with_reload_s": back}
        changed = {"difference": difference(after, before)}
        yield Row("scores after a hand-over", changed | figures, {"difference": 0.0})
        yield _lost_peer("receiver killed", transfer, actor, rollout, signal.SIGKILL, 0.0)


def nccl(session: Session) -> Iterator[Row]:
    """Send weights over NCCL to another group, and stop the process that receives."""
    with _actor_and_rollout(session, over_nccl=True) as (actor, rollout):
        with WeightTransfer(actor, rollout, transport="process_group", timeout=120) as transfer:
            yield _sent("weights over NCCL", transfer, "process_group")
        limit = session.scale.stopped_s
        transfer = WeightTransfer(actor, rollout, transport="process_group", timeout=limit)
        pid = rollout.execute_func_rank_zero(os.getpid)
        try:
            yield _lost_peer("NCCL to a stopped peer", transfer, actor, rollout, signal.SIGSTOP, limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _sent(name: str, transfer: WeightTransfer, transport: str) -> Row:
    """Send the weights; the transfer raises if their fingerprints differ."""
    report = transfer.run()
    sent = report.bytes_sent / GB
    figures = {"seconds": report.seconds, "sent_gb": sent, "gb_per_s": sent / report.seconds}
    return Row(name, {"transport": report.transport, **figures}, {"transport": transport})


def _lost_peer(
    name: str, transfer: WeightTransfer, source: Any, target: Any, number: signal.Signals, watched_s: float
) -> Row:
    """Send a signal to the receiving process; the sender must get an error, and be usable for some time after it."""
    os.kill(target.execute_func_rank_zero(os.getpid), number)
    started, error = time.monotonic(), ""
    try:
        transfer.run()
    except MControllerError as raised:  # of the transfer, or of the dead rank, whichever is noticed first
        error = str(raised).partition("\n")[0][:200]
    seconds = time.monotonic() - started
    while time.monotonic() < started + 2 * seconds + watched_s:
        source.execute_func_rank_zero(os.getpid)
        time.sleep(min(1.0, watched_s))
    source.execute_func_rank_zero(_probe)
    return Row(name, {"error": error, "until_error_s": seconds, "raised": str(bool(error))}, {"raised": "True"})


def engines(session: Session) -> Iterator[Row]:
    """Generate beside a loaded actor, with Megatron's layers and with vLLM."""
    for engine in ("megatron", "vllm"):
        if engine == "vllm" and not has_vllm(session.vllm_python):
            reason = f"{session.vllm_python} has no vllm: pass --vllm-python"
            yield Row("vllm", {"error": reason}, is_skipped=True)
            continue
        settings: dict[str, Any] = {
            "engine": engine,
            "response_length": session.scale.decoded,
            "verify_weights": "fingerprints",
            "vllm": VllmConfig(python=session.vllm_python),
        }
        config, started = session.scale.config(LAYERS[-1], **settings), time.monotonic()
        with RayResourcePool([1]) as pool, _group(config, "actor_rollout", pool) as policy:
            yield Row(f"{engine}: start", {"seconds": time.monotonic() - started})
            yield from _updates(engine, policy, session)
            seconds, sampled = fastest(policy.generate_sequences, session.scale.prompts())
        figures = {"tokens_per_s": int(sampled.batch["response_mask"].sum()) / seconds}
        limits = {}
        if engine == "vllm":
            bare = _bare_vllm(config, session)
            figures |= {"bare_tokens_per_s": bare, "bare_by_this": bare / figures["tokens_per_s"]}
            limits = {"bare_by_this": 1 / 0.95}
        yield Row(f"{engine}: sampled tokens", figures, limits)


def _updates(engine: str, policy: Any, session: Session) -> Iterator[Row]:
    """Update the policy, and compare what the engine generates with its scores, and after it slept."""
    greedy = session.scale.prompts(do_sample=False)
    trained = policy.generate_sequences(greedy)
    trained = trained.union(policy.compute_log_prob(trained))
    trained.batch["advantages"] = trained.batch["response_mask"].float()
    trained.meta_info.pop("metrics", None)
    policy.update_actor(trained)
    again = policy.generate_sequences(greedy)  # gets the new weights, and raises if their fingerprints differ
    metrics = again.meta_info.get("metrics", {})
    if "rollout/update_bytes" in metrics:
        seconds, sent = (_first(metrics[f"rollout/update_{unit}"]) for unit in ("seconds", "bytes"))
        copied = policy.execute_func_rank_zero(_device_copy_gb_per_s)
        figures = {"sent_gb": sent / GB, "seconds": seconds, "gb_per_s": sent / GB / seconds}
        yield Row(f"{engine}: update", {**figures, "device_copy_gb_per_s": copied})
    drift = drift_of(again, policy.compute_log_prob(again))
    # 28 layers round more than the four of part a: 0.018 on an H100
    yield Row(f"{engine}: log-probabilities after an update", {"difference": drift}, {"difference": 4e-2})
    policy.offload()
    awake, after = timed(policy.generate_sequences, greedy)
    differ = int((after.batch["responses"] != again.batch["responses"]).any(1).sum())  # of the same batch
    yield Row(f"{engine}: rows that differ after sleep", {"rows": differ, "wake_s": awake}, {"rows": 0})


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def _device_copy_gb_per_s() -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds, _ = fastest(torch.empty_like(source).copy_, source)
    return source.nbytes / GB / seconds


def _bare_vllm(config: ActorConfig, session: Session) -> float:
    """Return the tokens per second of vLLM alone, on the same prompts, with the same lengths and sampling."""
    columns = session.scale.prompts().tensors()
    pairs = zip(columns["input_ids"], columns["attention_mask"], strict=True)
    engine = engine_arguments(config, str(policy_folder(config)), 0.6)
    del engine["enable_sleep_mode"]
    sampling = {"temperature": 1.0, "logprobs": 0, "max_tokens": config.rollout.response_length, "ignore_eos": True}
    given = {"engine": engine, "sampling": sampling, "prompts": [ids[mask.bool()].tolist() for ids, mask in pairs]}
    variables = {name: value for name, value in engine_environment(["0"]).items() if value is not None}
    done = subprocess.run(
        [session.vllm_python, str(Path(__file__).with_name("bare_vllm.py"))],
        input=json.dumps(given),
        env=interpreter_variables(session.vllm_python) | variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600.0,
        check=True,
    )
    return float(done.stdout.split()[-1])


CHECKS = (worker, colocated, engines, nccl)
"""The checks of the part, which need ``local_ray``."""
