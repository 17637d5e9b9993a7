"""Write a trace as OpenTelemetry's spans: the JSON of OTLP, which collectors take at ``/v1/traces``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mcontroller.trace.reading import RunTrace, TraceEvent, TraceLane


def write_otlp(trace: RunTrace, path: Path) -> None:
    """Write one trace with a resource for the controller and one for each rank; a span is the parent of those in it."""
    ahead = trace.controllers[0].about["time_us"] if trace.controllers else 0
    trace_id = hashlib.sha256(str(ahead).encode()).hexdigest()[:32]
    lanes = [*trace.controllers, *trace.ranks]
    spans = [_resource(lane, number, trace_id, ahead) for number, lane in enumerate(lanes, 1)]
    path.write_text(json.dumps({"resourceSpans": spans}, separators=(",", ":")), encoding="utf-8")


def _resource(lane: TraceLane, number: int, trace_id: str, ahead: int) -> dict[str, Any]:
    about = {"service.name": lane.about["group"], "host.name": lane.about["node"], "rank": lane.about["rank"]}
    attributes = _attributes(about | lane.coordinates)
    spans: list[dict[str, Any]] = []
    open_: list[tuple[TraceEvent, str]] = []
    for index, event in enumerate(lane.events):
        while open_ and open_[-1][0].end < event.end:
            open_.pop()
        span_id = f"{number << 40 | index + 1:016x}"
        counted = _attributes({"number": event.number, "waiting_us": event.waiting})
        span = {"traceId": trace_id, "spanId": span_id, "name": event.name, "kind": 1, "attributes": counted}
        if open_:
            span["parentSpanId"] = open_[-1][1]
        begin = (event.begin + ahead) * 1000
        spans.append(span | {"startTimeUnixNano": str(begin), "endTimeUnixNano": str(begin + event.took * 1000)})
        open_.append((event, span_id))
    scope = {"scope": {"name": "mcontroller.trace"}, "spans": spans}
    return {"resource": {"attributes": attributes}, "scopeSpans": [scope]}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {
        name: {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}
        for name, value in values.items()
    }
    return [{"key": name, "value": value} for name, value in kinds.items()]
