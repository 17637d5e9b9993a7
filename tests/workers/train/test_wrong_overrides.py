"""What a user overrides returns something else: an error that says what is expected, and weights that do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.workers.roles import OPTIM, actor, critic, experience, largest_difference, own_shard, weights
from workers.actor import ActorRolloutRefWorker
from workers.critic import CriticWorker

pytestmark = pytest.mark.simulated


def overriding(method: str, change: Callable[[Any], Any], base: Any = ActorRolloutRefWorker) -> Any:
    """A worker class whose method returns what ``change`` makes of its result."""

    def changed(self: Any, *args: Any) -> Any:
        return change(getattr(base, method)(self, *args))

    return type("Changed", (base,), {method: changed})


def key_of_error(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value.key)


def keys_of_errors(method: str, change: Callable[[Any], Any]) -> list[str]:
    worker = actor({}, "actor", overriding(method, change), ppo_epochs=1)
    batch = experience(4)
    return [key_of_error(lambda: worker.compute_log_prob(batch)), key_of_error(lambda: worker.update_actor(batch))]


@pytest.mark.parametrize(
    "change",
    [lambda scores: None, lambda scores: scores[0], lambda scores: scores[:, :1]],
    ids=["nothing", "one dim less", "fewer rows"],
)
def test_an_output_of_forward_step_that_does_not_fit_is_an_error(change: Any) -> None:
    assert run_ranks(keys_of_errors, 1, "forward_step", change) == [["forward_step"] * 2]


def test_a_stage_without_hidden_states_does_not_leave_the_next_one_waiting() -> None:
    with pytest.raises(ConfigError) as caught:
        run_ranks(lambda: actor({"pp": 2}, "actor", overriding("forward_step", str)).update_actor(experience(4)), 2)
    assert caught.value.key == "forward_step"


def error_of_values() -> list[str]:
    worker: Any = overriding("forward_step", lambda values: values[..., None], CriticWorker)
    value, batch = critic({}, worker, ppo_epochs=1), experience(4)
    return [key_of_error(lambda: value.compute_values(batch)), key_of_error(lambda: value.update_critic(batch))]


def test_values_of_another_shape_are_an_error() -> None:
    assert run_ranks(error_of_values, 1) == [["forward_step"] * 2]


@pytest.mark.parametrize(
    "change",
    [lambda chunks: None, lambda chunks: chunks[0], lambda chunks: chunks * 2],
    ids=["nothing", "a module", "too many"],
)
def test_chunks_that_are_not_those_of_the_stage_are_an_error(change: Any) -> None:
    keys = run_ranks(lambda: key_of_error(lambda: actor({}, "actor", overriding("build_model", change))), 1)
    assert keys == ["build_model"]


@pytest.mark.parametrize("rules", [None, {"entropy": "token mean"}])
def test_metrics_without_rules_are_an_error(rules: Any) -> None:
    def update() -> str:
        worker = actor({}, "actor", overriding("metrics", lambda metrics: rules), ppo_epochs=1)
        return key_of_error(lambda: worker.update_actor(experience(4)))

    assert run_ranks(update, 1) == ["metrics"]


def with_other_count(parallel: dict[str, Any], optim: dict[str, Any], factor: float) -> tuple[list[Any], float]:
    """The error of an update, and of the step after forward_backward, and how far the weights have moved."""

    def changed(loss: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        return loss[0], factor * loss[1], loss[2]

    settings = {"ppo_epochs": 1, "optim": OPTIM | {"warmup_steps": 0} | optim}
    worker = actor(parallel, "actor", overriding("loss", changed), **settings)
    batch, before = own_shard(experience(8), worker), weights(worker)
    keys = [key_of_error(lambda: worker.update_actor(batch))]
    worker.forward_backward(batch)
    return [*keys, key_of_error(worker.optim_step)], largest_difference(before, weights(worker))


@pytest.mark.parametrize(
    ("ranks", "parallel", "optim", "factor"),
    [
        (2, {}, {}, -1),
        (2, {"pp": 2}, {"clip_grad": 0.0}, -1),
        (1, {}, {"on_nonfinite": "skip"}, -1),
        (2, {"pp": 2}, {}, 0),
    ],
    ids=["dp2", "pp2 without clipping", "skipping", "0"],
)
def test_a_loss_that_counts_nothing_or_less_trains_nothing(
    ranks: int, parallel: Any, optim: Any, factor: float
) -> None:
    assert run_ranks(with_other_count, ranks, parallel, optim, factor) == [(["loss"] * 2, 0.0)] * ranks


def parting_rows() -> str:
    worker = actor({}, "actor", ppo_epochs=1, ppo_mini_batch_size=4)
    numbers = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1])[:, None]  # the last pair, on the second rank
    batch = experience(8).with_tensors({"mini_batches": numbers})
    batch.meta_info["rows_together"] = 2
    with pytest.raises(DataError) as caught:
        worker.update_actor(own_shard(batch, worker))
    return str(caught.value.fields["column"])


def test_mini_batches_that_part_rows_of_one_rank_are_an_error_on_all() -> None:
    assert run_ranks(parting_rows, 2) == ["mini_batches"] * 2
