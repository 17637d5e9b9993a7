"""A transfer that loses a bucket or a tensor is reported with the names, and the target does not generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from mcontroller.errors import CallRejected
from tests.workers.roles import experience
from tests.workers.weights.transfer.test_equal_generation import EXPERTS, TIED, generated, group
from workers.weights.fingerprints import WeightsNotArrived
from workers.weights.transfer.endpoint import TRANSPORTS, InProcess
from workers.weights.transfer.plan import PeerSlices
from workers.weights.transfer.weight_transfer import WeightTransfer


class Lossy(InProcess):
    """Loses the second bucket, or one slice of it, when it is received."""

    loses = ""

    def receive(self, index: int) -> Iterator[tuple[PeerSlices, Tensor]]:
        for slices, data in super().receive(index):
            if index != 1 or not type(self).loses:
                yield slices, data
            elif type(self).loses == "slice" and len(slices.moves) > 1:
                yield slices._replace(moves=slices.moves[:-1]), data


@pytest.fixture(scope="module", autouse=True)
def lossy_transport() -> None:
    TRANSPORTS.add("lossy", Lossy)


@pytest.mark.parametrize(
    ("model", "ranks", "from_axes", "to_ranks", "to_axes"),
    [
        ({"dtype": "bfloat16"}, 2, {"tp": 2}, 1, {}),
        (TIED, 2, {"pp": 2}, 2, {"tp": 2}),
        (EXPERTS, 2, {"ep": 2}, 1, {}),
    ],
    ids=["dense-bfloat16", "tied", "experts"],
)
def test_lost_weights_are_reported_with_their_names(
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    ranks: int,
    from_axes: dict[str, Any],
    to_ranks: int,
    to_axes: dict[str, Any],
) -> None:
    actor = group("actor_rollout", ranks, from_axes, model, optim={"lr": 1e-2, "warmup_steps": 0})
    rollout = group("rollout", to_ranks, to_axes, model | {"seed": 7})
    with WeightTransfer(actor, rollout, transport="lossy", bucket_bytes=4096) as transfer:
        report = transfer.run()
        assert report.metrics()["weights/verify_seconds"] > 0
        actor.update_actor(experience(8))
        held = rollout.describe_weights()
        lost = {
            held[move.target_rank - ranks].tensors[move.target_slot].name
            for bucket in transfer.schedule.by_rank[ranks:]
            for slices in bucket[1]
            for move in slices.moves
        }
        for loses in ("bucket", "slice"):
            monkeypatch.setattr(Lossy, "loses", loses)
            with pytest.raises(WeightsNotArrived) as caught:
                transfer.run()
            error = caught.value
            assert error.update == 1 and error.tensors and error.ranks
            assert not error.missing and not error.unknown and set(error.tensors) <= lost
            with pytest.raises(CallRejected):
                generated(rollout)
        monkeypatch.setattr(Lossy, "loses", "")
        transfer.run()
    assert set(generated(rollout).batch["policy_version"].tolist()) == {1}


def test_the_check_is_turned_off_by_the_configuration_of_the_target(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = {"verify_weights": "never"}
    actor, rollout = group("actor_rollout", 1, {}, {}), group("rollout", 1, {}, {"seed": 7}, rollout=never)
    monkeypatch.setattr(Lossy, "loses", "bucket")
    with WeightTransfer(actor, rollout, transport="lossy", bucket_bytes=4096) as transfer:
        assert "weights/verify_seconds" not in transfer.run().metrics()
    assert "rollout receives are not verified" in caplog.text
