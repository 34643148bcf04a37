"""Messages of CUDA graphs by the thousand: a hostile one is refused in one way only."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mx.graphs.bounds import check
from mx.graphs.message import Capture, decode, encode
from mx.graphs.package import Graph, GraphError
from mx.wire.v1 import graphs_pb2 as pb
from tests.support.graphs import packages, small

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 64, 1 << 16, (1 << 32) - 1]) | st.integers(0, 1 << 20)
WIDE = NUMBERS | st.sampled_from([1 << 32, 1 << 47, 1 << 57, 1 << 63, (1 << 64) - 1])
SIGNED = st.sampled_from([-(1 << 31), -1, 0, 1, (1 << 31) - 1]) | st.integers(0, 1 << 20)
TEXTS = st.sampled_from(["", "_Zk", "F32", "\x1b[2J", "é", "x" * 2000]) | st.text(max_size=3)


def _value(draw: Any, field: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return draw(TEXTS)
    if field.type == field.TYPE_BYTES:
        return draw(st.binary(max_size=40))
    if field.type == field.TYPE_INT32:
        return draw(SIGNED)
    return draw(WIDE if field.type == field.TYPE_UINT64 else NUMBERS)


def spoil(draw: Any, message: Any) -> None:
    """Change one field somewhere inside a message."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    repeated = field.is_repeated
    if field.message_type is None:
        if not repeated:
            setattr(message, field.name, _value(draw, field))
            return
        items = getattr(message, field.name)
        if items and draw(st.booleans()):
            del items[draw(st.integers(0, len(items) - 1))]
        else:
            items.insert(draw(st.integers(0, len(items))), _value(draw, field))
        return
    inner = getattr(message, field.name)
    if not repeated:
        inner.SetInParent()
        if draw(st.integers(0, 3)):
            spoil(draw, inner)
        return
    what = draw(st.sampled_from(["inside", "inside", "inside", "drop", "double", "add"]))
    if what == "add" or not inner:
        inner.add()
        return
    at = draw(st.integers(0, len(inner) - 1))
    if what == "drop":
        del inner[at]
    elif what == "double":
        inner.add().CopyFrom(inner[at])
    else:
        spoil(draw, inner[at])


@settings(max_examples=600)
@given(packages() | packages(small()), st.integers(1, 3), st.data())
def test_messages_with_anything_in_them(
    given: tuple[Graph, ...], times: int, data: st.DataObject
) -> None:
    message = pb.CudaGraph.FromString(encode(*given))
    for _ in range(times):
        spoil(data.draw, message)
    try:
        found = decode(message.SerializeToString())
    except GraphError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
    else:
        for each in found:
            check(each)
        assert decode(encode(*found)) == found


@settings(max_examples=600)
@given(
    st.binary(max_size=300), st.integers(0, 1 << 16), st.sampled_from([decode, Capture.from_bytes])
)
def test_bytes_of_any_kind(noise: bytes, at: int, read: Any) -> None:
    data = encode(small())
    at %= len(data)
    for spoiled in (noise, data[:at], data[:at] + noise + data[at:]):
        try:
            read(spoiled)
        except GraphError as error:
            assert str(error).isprintable()
