"""Event streams in any chunking and any of the standard's spellings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.wire.sse import SseError, SseParser

payload = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\n\0"), max_size=40).map(str.encode)
noise = st.sampled_from([b":\n", b": ping\n", b"event: x\n", b"id: 7\n", b"retry: 1\n", b":\n\n", b"\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Bytes of a stream and the payloads it carries."""
    out, payloads = b"", []
    for _ in range(draw(st.integers(0, 6))):
        out += b"".join(draw(st.lists(noise, max_size=2)))
        lines = draw(st.lists(payload, min_size=1, max_size=3))
        for line in lines:
            space = b" " if line.startswith(b" ") or draw(st.booleans()) else b""
            out += b"data:" + space + line + b"\n"
        out += b"\n"
        payloads.append(b"\n".join(lines))
    return out.replace(b"\n", draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))), payloads


@given(stream=streams(), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_chunking_gives_the_same_events(stream: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    raw, payloads = stream
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    parser = SseParser()
    chunks = [raw[a:b] for a, b in itertools.pairwise(places)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == payloads
    parser = SseParser()
    assert [event for i in range(len(raw)) for event in parser.feed(raw[i : i + 1])] == payloads
    assert not parser.has_partial_event


def test_a_character_split_between_chunks_stays_whole() -> None:
    raw = 'data: {"text":"日本🎉"}\n\n'.encode()
    parser = SseParser()
    assert [e for i in range(len(raw)) for e in parser.feed(raw[i : i + 1])] == ['{"text":"日本🎉"}'.encode()]


def test_an_event_of_a_megabyte_in_small_chunks_costs_one_pass() -> None:
    frame = b"data: " + b"x" * 1_000_000 + b"\n\n"
    parser = SseParser()
    events = [e for i in range(0, len(frame), 100) for e in parser.feed(frame[i : i + 100])]
    assert [len(e) for e in events] == [1_000_000]


def test_several_events_in_one_chunk() -> None:
    assert SseParser().feed(b"data: a\n\ndata: b\n\n:\n\ndata: c\n\n") == [b"a", b"b", b"c"]


def test_comments_are_counted_and_do_not_end_an_event() -> None:
    parser = SseParser()
    assert parser.feed(b":\n\ndata: a\n:\n") == []
    assert parser.comments == 2
    assert parser.feed(b"\n") == [b"a"]


def test_a_stream_cut_inside_an_event_is_told() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert parser.has_partial_event


@pytest.mark.parametrize("chunk", [b"data: " + b"x" * 200, b"x" * 200, b"data: xxxxxxxxxx\n" * 20])
def test_an_endless_event_is_refused(chunk: bytes) -> None:
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(SseError, match="100 bytes"):
        parser.feed(chunk)


def test_the_bound_is_of_one_event() -> None:
    parser = SseParser(max_event_bytes=100)
    assert len(parser.feed(b"data: xxxxxxxxxx\n\n" * 100)) == 100


def test_complete_events_come_out_before_the_refusal() -> None:
    parser = SseParser(max_event_bytes=100)
    assert parser.feed(b"data: a\n\ndata: " + b"x" * 200) == [b"a"]
    with pytest.raises(SseError):
        parser.feed(b"x")
