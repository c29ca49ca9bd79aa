import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.wire.frames import MAX_FRAME_BYTES, Frames, frame


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_payloads_are_whole_however_the_stream_is_cut(payloads: list[bytes], size: int) -> None:
    stream = b"".join(map(frame, payloads))
    frames = Frames()
    assert [p for at in range(0, len(stream), size) for p in frames.feed(stream[at : at + size])] == payloads


def test_a_length_above_the_limit_is_a_stream_out_of_step() -> None:
    frames = Frames()
    assert list(frames.feed(MAX_FRAME_BYTES.to_bytes(4, "big"))) == []
    with pytest.raises(ValueError, match="frame of 8388609 bytes"):
        list(Frames().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))
