"""Roles on the fake CUDA device: where their numbers are, what they compute, and what they make the host wait for."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_cuda.cuda_api import runtime
from tests.fake_cuda.pinned import pinned
from tests.fake_cuda.reference import ROWS, computed
from tests.fake_cuda.tags import traffic
from tests.forking import run_ranks
from tests.workers.roles import GREEDY, MODEL, VOCAB, actor, experience, prompts

pytestmark = pytest.mark.processes

NEVER = VOCAB - 1  # no prompt and no response of these tests has this token
ROUTED = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process without the fake CUDA device computes."""
    file = tmp_path_factory.mktemp("on_cpu") / "computed.pt"
    subprocess.run([sys.executable, "-m", "tests.fake_cuda.reference", str(file)], check=True, timeout=120)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(1, {}), (4, {"tp": 2, "pp": 2, "sequence_parallel": True})],
    ids=["one process", "tp2-pp2-sp"],
)
def test_the_gpu_path_computes_what_the_cpu_path_does(
    ranks: int, parallel: dict[str, Any], on_cpu: dict[str, Any]
) -> None:
    results = run_ranks(computed, ranks, parallel)
    for name, tolerance in (("responses", 0), ("log_probs", 1e-4)):
        values = [rank[name] for rank in results if rank[name] is not None]
        assert values
        for mine in values:
            torch.testing.assert_close(mine, on_cpu[name], atol=tolerance, rtol=0)
    for rank in results:
        assert rank["grad_norm"] == pytest.approx(on_cpu["grad_norm"], rel=1e-4)
        assert rank["weights"].keys() == on_cpu["weights"].keys()
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, on_cpu["weights"][name], atol=1e-4, rtol=0, msg=name)


def placed(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, buffer, gradient and tensor of the optimizer, with its kind."""
    for chunk in worker.model:
        yield from (("parameter", parameter) for parameter in chunk.parameters())
        yield from (("buffer", buffer) for _, buffer in chunk.named_buffers())
        yield from (("gradient", parameter.main_grad) for parameter in chunk.parameters())
    optimizer = worker.state.optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from (("main parameter", parameter) for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from ((name, value) for name, value in state.items() if torch.is_tensor(value))


def described(worker: Any) -> set[tuple[str, str, str]]:
    """Return kind, device and dtype of everything of a worker; the count of Adam's steps is on the host."""
    return {(kind, str(tensor.device), str(tensor.dtype)[6:]) for kind, tensor in placed(worker) if kind != "step"}


def after_each_change(distributed: bool, dtype: str, directory: Path) -> list[set[tuple[str, str, str]]]:
    """Describe a worker after an update, an offload with its reload, and the load of a checkpoint; trained again."""
    changes = {
        "optim": {"lr": 1e-3, "distributed_optimizer": distributed},
        "model": MODEL | ROUTED | {"dtype": dtype},
        "ppo_epochs": 1,
    }
    worker = actor({"pp": 2}, "actor", **changes)
    worker.update_actor(experience(ROWS))
    values = [described(worker)]
    worker.offload()
    worker.reload()
    worker.update_actor(experience(ROWS))
    values.append(described(worker))
    worker.save_checkpoint(str(directory))
    again = actor({"pp": 2}, "actor", **changes)
    again.load_checkpoint(str(directory))
    values.append(described(again))
    again.update_actor(experience(ROWS))
    return [*values, described(again)]


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", False), ("bfloat16", True)])
def test_every_number_of_training_is_on_the_gpu_of_its_rank_in_its_dtype(
    dtype: str, distributed: bool, tmp_path: Path
) -> None:
    for rank, changes in enumerate(run_ranks(after_each_change, 2, distributed, dtype, tmp_path)):
        gpu = f"cuda:{rank}"
        expected = {("parameter", gpu, dtype), ("buffer", gpu, "float32"), ("gradient", gpu, "float32")}
        expected |= {(kind, gpu, "float32") for kind in ("main parameter", "exp_avg", "exp_avg_sq")}
        assert changes == [expected] * 4


def locked() -> tuple[list[int], int, int, int]:
    """Return bytes: page-locked ones of two offloads, after the reload, and of torch's allocator; of the parts."""
    worker = actor({}, "actor", ppo_epochs=1)
    worker.update_actor(experience(ROWS))
    cached, values = pinned.cached, []
    kept = [tensor.untyped_storage() for part in ("params", "optimizer") for tensor in worker.offloader.parts()[part]]
    size = sum({storage._cdata: -(-storage.nbytes() // 512) * 512 for storage in kept}.values())
    for _ in range(2):
        worker.offload()
        values.append(sum(runtime.registered.values()))
        worker.update_actor(experience(ROWS))
    worker.reload()
    return values, sum(runtime.registered.values()), pinned.cached - cached, size


def test_offloaded_parts_lock_their_bytes_once_and_release_them() -> None:
    [(values, left, cached, size)] = run_ranks(locked, 1)
    assert values == [size, size] and size > 400_000
    assert (left, cached) == (0, 0)


def offloaded() -> tuple[dict[str, int], set[tuple[int, ...]]]:
    """Return the bytes of the GPU before an offload, freed by it, after it and after the reload; and what stays."""
    worker = actor({"tp": 2}, ppo_epochs=1)
    worker.update_actor(experience(ROWS))
    worker.generate_sequences(prompts(ROWS, GREEDY))
    gc.collect()
    sizes = {"before": torch.cuda.memory_allocated()}
    sizes["freed"] = worker.offload()
    gc.collect()
    sizes |= {"after": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    with warnings.catch_warnings(action="ignore"):
        tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor) and value.is_cuda]
    stay = {tuple(tensor.shape) for tensor in tensors if tensor.untyped_storage().nbytes()}
    worker.reload()
    return sizes | {"reloaded": torch.cuda.memory_allocated()}, stay


def test_every_tensor_leaves_the_device_with_an_offload_and_comes_back() -> None:
    for sizes, stay in run_ranks(offloaded, 2):
        assert sizes["freed"] > 400_000
        assert sizes["after"] == sizes["reserved"] <= 4, stay  # the scale of the loss
        tables = sizes["before"] - sizes["after"] - sizes["freed"]  # of rotary positions: dropped, and computed again
        assert 0 <= tables < 1024 and sizes["reloaded"] == sizes["before"] - tables


def waits_of_generation(length: int) -> tuple[int, int]:
    """Return how often the host waits while this many tokens are generated, and how many were."""
    worker = actor({}, "rollout", rollout={"prompt_length": 10, "response_length": length})
    traffic.clear()
    mask = worker.generate_sequences(prompts(4, GREEDY | {"eos_token_id": NEVER})).batch["response_mask"]
    return traffic.synchronisations, int(mask.sum(1).max())


def test_generation_waits_once_for_each_token_and_four_times_for_a_batch() -> None:
    """Of the four, three copy the results to the host."""
    for length in (2, 9):
        assert run_ranks(waits_of_generation, 1, length) == [(length + 4, length)]


def waits_of_training(epochs: int) -> tuple[int, int]:
    """Return how often the host waits for an update, and the number of its optimizer steps."""
    worker = actor({}, "actor", ppo_epochs=epochs, ppo_mini_batch_size=4)
    traffic.clear()
    worker.update_actor(experience(ROWS))
    return traffic.synchronisations, epochs * ROWS // 4


def test_training_waits_once_for_each_optimizer_step_and_thrice_for_an_update() -> None:
    """For the norm of the gradient; and for the rows of the ranks, their mini-batches, and the metrics of all steps."""
    for epochs in (1, 3):
        [(waits, steps)] = run_ranks(waits_of_training, 1, epochs)
        assert waits == steps + 3
