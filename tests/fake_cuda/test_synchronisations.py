"""How often the host waits for the device: never inside a layer, and once for each generated token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_cuda.tags import traffic
from tests.forking import run_ranks
from tests.workers.roles import RESPONSE, SAMPLED, actor, experience, prompts

pytestmark = pytest.mark.processes


def waits(method: str, layers: int, packed: bool, micro_batch: int) -> int:
    """Return how often the host waits in the second call of a method, on 8 rows."""
    sizes: dict[str, Any] = {"ppo_epochs": 1, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": micro_batch}
    worker = actor({}, "actor_rollout", packed=packed, model={"num_layers": layers}, **sizes)
    batch = prompts(8, SAMPLED | {"eos_token_id": -1}) if method == "generate_sequences" else experience(8)
    getattr(worker, method)(batch)
    traffic.clear()
    getattr(worker, method)(batch)
    return traffic.synchronisations


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["compute_log_prob", "update_actor"])
def test_the_host_waits_as_often_for_four_layers_as_for_two(method: str, packed: bool) -> None:
    found = [run_ranks(waits, 1, method, layers, packed, 4)[0] for layers in (2, 4)]
    assert found[0] == found[1] > 0


def test_packed_micro_batches_do_not_make_the_host_wait() -> None:
    few, many = (run_ranks(waits, 1, "update_actor", 2, True, micro_batch)[0] for micro_batch in (4, 1))
    assert few == many


def test_the_host_waits_once_for_each_generated_token() -> None:
    found = run_ranks(waits, 1, "generate_sequences", 2, False, 4)[0]
    assert RESPONSE <= found <= RESPONSE + 6
