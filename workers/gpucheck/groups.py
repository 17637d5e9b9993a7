"""Part d: groups on Ray: a forked worker, two groups on one GPU, engines, and NCCL to a peer that stops."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping
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
from workers.gpucheck.cases import ONE_PROCESS, ROWS, STEPS, batch_columns
from workers.gpucheck.computed import PROMPT, RESPONSE, computed, difference, drift_of
from workers.gpucheck.equality import LAYERS, LIMITS, SIZES
from workers.gpucheck.policy import GB, Session, actor_config, fastest, timed
from workers.gpucheck.ranks import alone, ranks_on_one_gpu
from workers.gpucheck.rows import Figure, Row, at_most, judged, skipped
from workers.memory.without_gpus import without_gpus
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
    [expected] = without_gpus(alone)([(computed, case, "float32", SIZES)])
    free = torch.cuda.mem_get_info()[0]
    config = actor_config(case.settings("float32", SIZES) | {"parallel": {"tp": ranks}})
    with RayResourcePool([ranks]) as pool, _group(config, "actor", pool) as group:
        process = group.execute_func_rank_zero(_probe)
        needs_one = ranks > 1 and torch.cuda.get_device_capability() < (10, 0)
        passed = process["right"] and process["forked"] and process["gpus"] == ranks
        passed = passed and (not needs_one or process["connections"] == "1")
        advice = "set CUDA_DEVICE_MAX_CONNECTIONS=1 in runtime_env, or see docs/gpu.md, 'The device of a worker'"
        yield judged("variables", passed, f"a forked process that computes on {ranks} GPUs", advice, **process)
        batch = DataProto.from_dict(batch_columns(ROWS, PROMPT, RESPONSE, SIZES["vocab_size"]))
        results = {"scores": _scores(group, batch)}
        for _ in range(STEPS):
            group.update_actor(batch)
        results["after"] = _scores(group, batch)
        for when, scores in results.items():
            advice = "the rows of part a, which runs without Ray, pass or fail first"
            yield at_most(f"{when} dense float32", difference(scores, expected[when]), LIMITS["float32"][when], advice)
    deadline = time.monotonic() + 10
    while (left := (free - torch.cuda.mem_get_info()[0]) / GB) > 0.1 and time.monotonic() < deadline:
        time.sleep(0.1)
    advice = "a process of the group still has memory: nvidia-smi lists it"
    yield at_most("GPU bytes left after shutdown, GB", left, 0.1, advice)


def _probe() -> dict[str, Any]:
    """Compute on the GPU of a worker, and return what its process is like."""
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    return {
        "right": bool((product == 64).all()),
        "forked": exits.record_of_this_process() is not None,
        "gpus": torch.cuda.device_count(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "not set"),
    }


def _scores(group: Any, batch: DataProto) -> torch.Tensor:
    """Return log-probabilities, ``[rows, response]``."""
    return group.compute_log_prob(batch).tensors()["old_log_probs"]


def colocated(session: Session) -> Iterator[Row]:
    """Send weights to a group on the same GPU, hand its memory over, and kill the group that receives."""
    scale, batch = session.scale, session.scale.batch()
    rollout_config = scale.config(LAYERS[-1], seed=2, response_length=scale.decoded)
    with (
        RayResourcePool([1], max_colocate_count=2) as pool,
        _group(scale.config(LAYERS[-1], seed=1), "actor", pool) as actor,
        _group(rollout_config, "rollout", pool) as rollout,
    ):
        transfer = WeightTransfer(actor, rollout, timeout=120)
        yield _sent(transfer, "initial weights", "cuda_ipc")
        actor.update_actor(batch)
        yield _sent(transfer, "updated weights", "cuda_ipc")
        before = _scores(actor, batch)
        away, freed = timed(lambda: sum(actor.offload()))
        generating, _ = timed(rollout.generate_sequences, scale.prompts())
        rollout.offload()
        back, after = timed(_scores, actor, batch)
        figures = {"offload_s": away, "freed_gb": freed / GB, "generate_s": generating, "score_with_reload_s": back}
        advice = "weights changed on their way"
        yield at_most("hand-over: scores that differ", difference(after, before), 0.0, advice, **figures)
        yield _lost_peer("receiver killed", transfer, actor, rollout, signal.SIGKILL, 0.0)


def nccl(session: Session) -> Iterator[Row]:
    """Send weights over NCCL to another group, on another GPU if there is one, and stop the process that receives."""
    scale, two = session.scale, torch.cuda.device_count() > 1
    with contextlib.ExitStack() as stack:
        pools = [RayResourcePool([1]) for _ in range(2)] if two else [RayResourcePool([1], max_colocate_count=2)] * 2

        def started(role: str, seed: int) -> Any:
            pool = stack.enter_context(pools.pop())
            variables = {} if two else ranks_on_one_gpu(role)
            return stack.enter_context(_group(scale.config(LAYERS[-1], seed=seed), role, pool, variables))

        actor, rollout = started("actor", 1), started("rollout", 2)
        with WeightTransfer(actor, rollout, transport="process_group", timeout=120) as transfer:
            yield _sent(transfer, "weights over NCCL", "process_group")
        transfer = WeightTransfer(actor, rollout, transport="process_group", timeout=scale.stopped_s)
        pid = rollout.execute_func_rank_zero(os.getpid)
        try:
            yield _lost_peer("NCCL to a stopped peer", transfer, actor, rollout, signal.SIGSTOP, scale.stopped_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _sent(transfer: WeightTransfer, what: str, transport: str) -> Row:
    """Send the weights; the transfer raises if their fingerprints differ."""
    report = transfer.run()
    sent_gb = report.bytes_sent / GB
    figures: dict[str, Figure] = {"transport": report.transport, "seconds": report.seconds, "sent_gb": sent_gb}
    advice = "set no expandable_segments in PYTORCH_CUDA_ALLOC_CONF: docs/gpu.md, 'Weights between colocated groups'"
    passed, rate = report.transport == transport, sent_gb / report.seconds
    return judged(what, passed, f"all, by {transport}", advice, **figures, gb_per_s=rate)


def _lost_peer(
    name: str, transfer: WeightTransfer, source: Any, target: Any, number: signal.Signals, watched_s: float
) -> Row:
    """Send a signal to the receiving process; the sender must get an error, and be usable for some time after it."""
    os.kill(target.execute_func_rank_zero(os.getpid), number)
    started, error = time.monotonic(), "none"
    try:
        transfer.run()
    except MControllerError as raised:  # of the transfer, or of the dead rank, whichever is noticed first
        error = str(raised).partition("\n")[0][:200]
    seconds, survived = time.monotonic() - started, True
    try:
        while time.monotonic() < started + seconds + watched_s:
            source.execute_func_rank_zero(os.getpid)
            time.sleep(min(1.0, watched_s))
        source.execute_func_rank_zero(_probe)
    except MControllerError as died:
        error, survived = f"{error}; then {died}"[:400], False
    advice = "the sender died, or got no error: do not use this transport between groups that may lose a peer"
    passed = survived and error != "none"
    return judged(name, passed, "an error, and the sender lives", advice, error=error, until_error_s=seconds)


def engines(session: Session) -> Iterator[Row]:
    """Generate beside a loaded actor, with Megatron's layers and with vLLM."""
    for engine in ("megatron", "vllm"):
        if engine == "vllm" and not has_vllm(session.vllm_python):
            yield skipped("vllm", f"{session.vllm_python} has no vllm: pass --vllm-python")
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
            rate = yield from _engine_rows(engine, policy, session)
        if engine == "vllm":
            yield _beside_bare_vllm(config, rate, session)


def _engine_rows(engine: str, policy: Any, session: Session) -> Generator[Row, None, float]:
    """Update the policy, and compare what the engine generates with its scores, and after it slept.

    Returns:
        Tokens per second of sampling.
    """
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
    advice = "the engine computes other log-probabilities than the policy"
    limit = 2 * LIMITS["bfloat16"]["scores"]  # 28 layers round more than part a's four: 0.018 on an H100
    yield at_most(f"{engine}: log-probabilities after an update", drift, limit, advice)
    policy.offload()
    awake, after = timed(policy.generate_sequences, greedy)
    differ = int((after.batch["responses"] != again.batch["responses"]).any(1).sum())  # of the same batch
    yield at_most(f"{engine}: rows that differ after sleep", differ, 0, "the engine lost its weights", wake_s=awake)
    seconds, sampled = fastest(policy.generate_sequences, session.scale.prompts())
    tokens_per_s = int(sampled.batch["response_mask"].sum()) / seconds
    yield Row(f"{engine}: sampled tokens", {"tokens_per_s": tokens_per_s})
    return tokens_per_s


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def _device_copy_gb_per_s() -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds, _ = fastest(torch.empty_like(source).copy_, source)
    return source.nbytes / GB / seconds


def _beside_bare_vllm(config: ActorConfig, tokens_per_s: float, session: Session) -> Row:
    """Compare tokens per second with those of vLLM alone, on the same prompts, with the same lengths and sampling."""
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
        capture_output=True,
        text=True,
        timeout=600.0,
    )
    if done.returncode:
        return judged("vllm: beside vLLM alone", False, "vLLM runs alone", done.stderr[-400:])
    bare = float(done.stdout.split()[-1])
    advice = "the way to the engine and back takes more than 5% of generation"
    figures = {"tokens_per_s": tokens_per_s, "bare_tokens_per_s": bare, "ratio": tokens_per_s / bare}
    return judged("vllm: beside vLLM alone", tokens_per_s >= 0.95 * bare, "at least 0.95", advice, **figures)


CHECKS = (worker, colocated, engines, nccl)
"""The checks of the part, which need ``local_ray``."""
