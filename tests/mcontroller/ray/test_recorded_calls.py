"""Calls over Ray are in the trace: on the controller, and on each rank, on one clock and with one number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mcontroller.ray import RayWorkerGroup
from mcontroller.trace.reading import read_trace
from mcontroller.trace.recorder import recording


def test_a_call_is_recorded_where_it_is_made_and_on_each_rank(
    start: Callable[..., RayWorkerGroup], tmp_path: Path
) -> None:
    with recording(tmp_path):
        group = start()
        for number in range(2):
            group.note("here", number)
        group.shutdown()
    start("unrecorded").note("here", 0)
    trace = read_trace(tmp_path)
    [controller] = trace.controllers
    named = {
        part: [event for event in controller.events if event.name == f"{part} plain.note"]
        for part in ("plan", "split", "send", "wait", "collect")
    }
    assert {part: len(events) for part, events in named.items()} == dict.fromkeys(named, 2)
    assert [(lane.about["group"], lane.about["rank"]) for lane in trace.ranks] == [("plain", 0), ("plain", 1)]
    for lane in trace.ranks:
        ran = [event for event in lane.events if event.name == "plain.note"]
        assert [event.number for event in ran] == [event.number for event in named["send"]]
        for sent, event, waited in zip(named["send"], ran, named["wait"], strict=True):
            assert sent.begin <= event.begin <= event.end <= waited.end  # one machine has one clock
    assert {lane.about["boot"] for lane in trace.ranks} == {controller.about["boot"]}
