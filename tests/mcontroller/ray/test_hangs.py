"""CallTimeout on real processes names the rank that others wait for, their collective, its group and their lines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import CallTimeout
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.ray.calls import supervision
from mcontroller.testing import simulated_worker_group
from parallel_state import ParallelLayout, Topology
from parallel_state.simulated import Deadlock
from tests.mcontroller.ray.collective_roles import Pairs
from trainer.stages import Stages

LAYOUT = ParallelLayout(4, tp=2)
CALL = "all_reduce(float32[3], op=SUM), call 0 on group TENSOR_MODEL_PARALLEL_GROUP [0, 1]"


@contextmanager
def pairs(report_after: float | None = None) -> Iterator[RayWorkerGroup]:
    options = ChannelOptions(report_after=report_after)
    with RayResourcePool([4], use_gpu=False, name_prefix="pairs", channel=options) as pool:
        topology = Topology.from_layout(LAYOUT)
        with RayWorkerGroup(pool, RayClassWithInitArgs(Pairs), name_prefix="pairs", topology=topology) as group:
            yield group


def timeout_of(method: Callable[..., object]) -> CallTimeout:
    with pytest.raises(CallTimeout) as caught:
        method(1)
    return caught.value


def test_a_rank_that_skips_a_collective_is_the_cause_as_in_the_simulator(ray_cluster: None) -> None:
    with pytest.raises(Deadlock) as simulated, simulated_worker_group(Pairs, LAYOUT) as group:
        group.skip_on(1)
    with pairs() as group:
        error = timeout_of(group.skip_on.options(timeout=1))
    cause, _, rest = str(simulated.value).partition("\n\n")
    assert error.cause == cause == "rank 1 (tp=1 dp=0) has ended, and rank 0 waits for it"
    assert (error.role, error.method, error.timeout, error.ranks) == ("pairs", "skip_on", 1, (0,))
    assert error.report == rest.partition("\n\n")[2]
    assert f"rank 0 (tp=0 dp=0): {CALL}\n" in error.report and "in skip_on" in error.report


def test_a_stuck_call_is_reported_once_and_fails_without_a_deadline(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "AGAIN_SECONDS", 0.2)
    with pairs(report_after=60.0) as group:
        stages, supervised = Stages(patience=0.5, factor=3.0), group.executor.processes
        stages.ran("other", 0.0, 9.0)
        for seconds, expected in ((0.1, 0.5), (0.3, 0.9)):
            stages.ran("skip", 0.0, seconds)
            stages.prepare("skip", group.skip_on)
            assert supervised.report_after == pytest.approx(expected)
        error = timeout_of(group.skip_on)
        assert error.cause == "rank 1 (tp=1 dp=0) has ended, and rank 0 waits for it"
        [record] = caplog.records
        assert record.getMessage().startswith("pairs.skip_on has no answer from 1 of 4 ranks after ")
        assert record.getMessage().endswith(f"{error.cause}\n\n{error.report}")
        assert error.timeout > 1.5
        assert group.broken is error


def test_a_rank_that_hangs_outside_of_collectives_is_reported_and_fails_with_its_line(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pairs(report_after=0.3) as group:
        group.fail_stuck_calls(0.3)
        error = timeout_of(group.oversleep_alone_on)
        [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert error.ranks == (1,) and error.report == ""
    assert error.cause.startswith("rank 1 (tp=1 dp=0) is in no collective, at ") and " in oversleep" in error.cause
    assert error.cause in record.getMessage() and error.cause in str(error).partition("\n")[0]
    assert 3.0 <= error.timeout < 6.0


def test_a_stopped_rank_is_the_cause_and_its_record_is_read_from_outside(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "QUERY_SECONDS", 1.0)
    with pairs() as group:
        stopped = group.process_id()[1]
        try:
            error = timeout_of(group.stop_on.options(timeout=1))
        finally:
            with suppress(ProcessLookupError):  # the end of the group may have killed it
                os.kill(stopped, signal.SIGKILL)
    assert error.cause == "rank 1 (tp=1 dp=0) is stopped by a signal, and rank 0 waits for it"
    assert "broadcast(float32[2, 2], root=1), call 1 on group TENSOR_MODEL_PARALLEL_GROUP [0, 1]" in error.report
    assert "its last on this group: all_reduce, call 0, at " in error.report
