"""A prediction is printed beside what the trace and the metrics show, and spans have their parents in OTLP's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.trace.predicted import PREDICTION
from mcontroller.trace.recorder import FOLDER, TraceRecorder

MS = 1_000_000


def test_predicted_is_beside_measured_and_spans_have_parents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = TraceRecorder(tmp_path / FOLDER, "controller", {"group": "controller", "rank": 0, "clocks": {}})
    controller.add("step", 0, 200 * MS, 1)
    controller.flush()
    about = {"group": "actor", "rank": 0, "launch": "a", "roles": {"actor": {"tp": 0, "pp": 0}}}
    rank = TraceRecorder(tmp_path / FOLDER, "actor-a-0", about)
    rank.add("forward", 20 * MS, 30 * MS, 0)
    rank.add("bytes TENSOR_MODEL_PARALLEL_GROUP", 100 * MS, 100 * MS, 3_000_000)
    rank.add("actor.update_actor", 10 * MS, 110 * MS, 0)
    rank.flush()
    predicted = {
        **{"hardware": "h100", "seconds": {"actor.update_actor": 0.2}, "bubble": {}},
        **{"bytes": {"actor.update_actor": {"TENSOR_MODEL_PARALLEL_GROUP": ["tp", 4_000_000]}}},
        "memory": {"actor": 2**31},
    }
    (tmp_path / PREDICTION).write_text(json.dumps(predicted))
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1, "memory/actor/update_actor/max_allocated_gb": 1.5}\n')
    assert main(["trace", str(tmp_path), "--otlp", str(tmp_path / "otlp.json")]) == 0
    printed = capsys.readouterr().out
    assert "time of actor.update_actor: 0.2 s predicted, 0.1 s measured" in printed
    assert "bytes of tp in actor.update_actor: 4 MB predicted, 3 MB measured" in printed
    assert "memory of actor: 2 GB predicted, 1.5 GB measured" in printed
    resources = json.loads((tmp_path / "otlp.json").read_text())["resourceSpans"]
    call, forward, _ = resources[1]["scopeSpans"][0]["spans"]
    assert (call["name"], forward["parentSpanId"]) == ("actor.update_actor", call["spanId"])
    assert int(call["endTimeUnixNano"]) - int(call["startTimeUnixNano"]) == 100 * MS
