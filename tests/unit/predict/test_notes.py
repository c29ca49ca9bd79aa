"""The worker's log lines."""

from __future__ import annotations

import io
import json

from router_ext.predict.notes import Notes


def test_a_line_is_one_object_with_its_fields() -> None:
    sink = io.StringIO()
    notes = Notes(level="warning", router="rtr_1", sink=sink)
    notes.info("quiet.event")
    notes.error("loud.event", path="p", bytes=3)
    (line,) = map(json.loads, sink.getvalue().splitlines())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "loud.event", "level": "error", "router": "rtr_1", "path": "p", "bytes": 3}


def test_of_an_exception_only_kind_and_place_are_told() -> None:
    sink = io.StringIO()
    try:
        raise ValueError("what somebody asked")
    except ValueError:
        Notes(sink=sink).exception("it.failed", pool="main")
    assert "what somebody asked" not in sink.getvalue()
    line = json.loads(sink.getvalue())
    assert (line["exception"], line["pool"]) == ("ValueError", "main")
    assert "test_notes.py" in line["frames"][-1]
