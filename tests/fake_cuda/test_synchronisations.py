"""How often the host waits for the device: never inside a layer, and not for another micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_cuda.tags import traffic
from tests.forking import run_ranks
from tests.workers.roles import actor, experience

pytestmark = pytest.mark.processes


def waits_of_an_update(layers: int, packed: bool, micro_batch: int) -> int:
    """Return how often the host waits in the second update, of 8 rows."""
    sizes: dict[str, Any] = {"ppo_epochs": 1, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": micro_batch}
    worker = actor({}, "actor_rollout", packed=packed, model={"num_layers": layers}, **sizes)
    worker.update_actor(experience(8))
    traffic.clear()
    worker.update_actor(experience(8))
    return traffic.synchronisations


@pytest.mark.parametrize("packed", [False, True])
def test_the_host_waits_as_often_for_four_layers_as_for_two(packed: bool) -> None:
    few, many = (run_ranks(waits_of_an_update, 1, layers, packed, 4)[0] for layers in (2, 4))
    assert few == many > 0


def test_packed_micro_batches_do_not_make_the_host_wait() -> None:
    few, many = (run_ranks(waits_of_an_update, 1, 2, True, micro_batch)[0] for micro_batch in (4, 1))
    assert few == many
