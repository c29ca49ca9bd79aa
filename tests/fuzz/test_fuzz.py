"""The fuzz harnesses over their seeds, and over what hypothesis makes of them; ``run.py`` goes on with atheris."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
from fuzz.harnesses import HARNESSES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router_ext.wire.sse import SseParser

EXAMPLES = int(os.environ.get("FAIRLANE_FUZZ_EXAMPLES", "40"))
_COST = {"http_requests": 4, "ledgers": 4, "spools": 2}
"""Those that cost more run less often."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**66), 2**66),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["stop", "json", "regex", "function", "text", "auto", "tgi", ""]),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, each in inner for place in places(each, (*path, name)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    name, *rest = path
    if isinstance(value, dict):
        return {**value, name: replaced(value[name], tuple(rest), new)}
    return [replaced(each, tuple(rest), new) if at == name else each for at, each in enumerate(value)]


@st.composite
def variants(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with one JSON value in it replaced, or with some bytes cut, repeated or overwritten."""
    data = draw(st.sampled_from(seeds))
    lines = data.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    prefix = b"data: " if lines[at].startswith(b"data: ") else b""
    try:
        value = json.loads(lines[at].removeprefix(prefix))
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict | list) and len(lines[at]) < 4_000 and draw(st.integers(0, 3)):
        changed = replaced(value, draw(st.sampled_from(places(value))), draw(values))
        lines[at] = prefix + json.dumps(changed).encode()
        return b"\n".join(lines)
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 20)))
        new = draw(st.binary(max_size=8) | st.just(data[begin:end] * 2))
        data = data[:begin] + new + data[end:]
    return data


@pytest.mark.parametrize("name", HARNESSES)
def test_whatever_comes_gives_a_result_or_the_documented_refusal(name: str) -> None:
    harness = HARNESSES[name]
    for seed in harness.seeds:
        harness.run(seed)

    @settings(
        max_examples=max(EXAMPLES // _COST.get(name, 1), 1), deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=variants(harness.seeds))
    def check(data: bytes) -> None:
        harness.run(data)

    check()


def _forgets_half_line_ends(parser: SseParser, chunk: bytes) -> list[bytes]:
    parser._skip_lf = False
    return _feed(parser, chunk)


_feed = SseParser._feed
FAULTS: dict[str, tuple[str, str, Any]] = {
    "a depth nobody thought of": ("tgi_records", "router_ext.wire.tgi.NotDecoded", msgspec.MsgspecError),
    "a count taken as it comes": ("relayed_bodies", "router_ext.gateway.passthrough._number", lambda v: int(v or 0)),
    "a line end cut in two": ("sse", "router_ext.wire.sse.SseParser._feed", _forgets_half_line_ends),
    "a spooled event believed": (
        "ledgers",
        "router_ext.sync.ledger._event_id",
        lambda payload: msgspec.json.decode(payload)["event"],
    ),
    "half a key": ("headers", "router_ext.gateway.auth.hmac.compare_digest", lambda a, b: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_harness_sees_a_fault_of_its_kind(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, target, mutant = FAULTS[fault]
    monkeypatch.setattr(target, mutant)
    harness = HARNESSES[name]

    def run() -> None:
        for seed in harness.seeds:
            harness.run(seed)

    with pytest.raises((AssertionError, RecursionError, ValueError)):
        run()
