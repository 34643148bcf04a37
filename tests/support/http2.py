"""HTTP/2 at the level of its frames, for peers that break it."""

from __future__ import annotations

from hypothesis import strategies as st


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


#: What a server begins with.
SETTINGS = frame(4, 0, 0, b"")
#: What a client begins with.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS

frames = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 3, 0x7FFFFFFF]),
    st.binary(max_size=64),
)
