"""Headers by the thousand: ours accepts nothing that the safetensors library rejects, agrees with
it on what it accepts, and fails in one way only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mx.core.types import DTYPE_BITS
from mx.errors import CheckpointError
from mx.storage.header import parse_header
from tests.support.crafted import entry, raw_file

deserialize: Any = safetensors.deserialize


def agree(data: bytes) -> bool:
    """Parse with both; return True if mx accepts. Fails where the two disagree."""
    nbytes = int.from_bytes(data[:8], "little")
    try:
        metadata, tensors = parse_header(data[8 : 8 + nbytes], Path("fuzzed"), len(data))
    except CheckpointError:
        return False
    library = dict(deserialize(data))  # raises, and fails the test, if only we accepted
    assert {t.spec.name for t in tensors} == library.keys()
    for tensor in tensors:
        theirs = library[tensor.spec.name]
        assert (tensor.spec.dtype, list(tensor.spec.shape)) == (theirs["dtype"], theirs["shape"])
        assert data[tensor.begin : tensor.end] == bytes(theirs["data"])
    assert metadata is None or all(isinstance(text, str) for text in metadata.values())
    return True


NAMES = st.sampled_from(
    ["a", "b", "model.layers.0.w", "é", "..", "a..b", "", "x\0", "__metadata__"]
)
NAMES |= st.text(max_size=4)
DTYPES = st.sampled_from([*sorted(DTYPE_BITS), "f32", "C128", "", 8, None])
NUMBERS = st.integers(0, 9) | st.sampled_from([-1, 1 << 31, 1 << 62, 1 << 64, 2.0, True, None, "1"])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": DTYPES,
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, max_size=3),
    },
    optional={"more": NUMBERS},
)


@st.composite
def plausible(draw: st.DrawFn) -> bytes:
    """A header that is right, its tensors in a row, or wrong in at most one place."""
    header: dict[str, Any] = {}
    position = 0
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = [8, *draw(st.lists(st.integers(0, 3), max_size=2))]
        header[name] = entry(dtype, shape, position)
        position = header[name]["data_offsets"][1]
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
    if draw(st.booleans()):
        victim = draw(st.sampled_from(sorted(header)))
        if "dtype" in header[victim]:
            header[victim] = header[victim] | draw(ENTRIES)
        else:
            header[victim] = draw(NUMBERS | st.dictionaries(st.text(max_size=2), NUMBERS))
    ascii_only = draw(st.booleans())
    text = json.dumps(header, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    return raw_file(text, bytes(position + draw(st.sampled_from([0, 0, 0, 1]))))


@given(plausible())
def test_nearly_right_headers(data: bytes) -> None:
    agree(data)


@given(st.dictionaries(NAMES, ENTRIES | NUMBERS, max_size=3), st.integers(0, 20))
def test_wild_headers(header: dict[str, Any], nbytes: int) -> None:
    agree(raw_file(json.dumps(header).encode("utf-8", "surrogatepass"), bytes(nbytes)))


VALID = raw_file(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 3], 0),
        "b": entry("BF16", [0], 24),
        "c": entry("F4", [4], 24),
    },
    bytes(26),
)


def test_the_valid_one_is_accepted() -> None:
    assert agree(VALID)


@settings(max_examples=400)
@given(st.data())
def test_flipped_cut_and_doubled_bytes(data: st.DataObject) -> None:
    header = bytearray(VALID[8:-26])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(header) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                header[at] = data.draw(st.integers(0, 255))
            case 1:
                del header[at]
            case 2:
                header[at:at] = header[at : at + data.draw(st.integers(1, 60))]
            case 3:
                header[at:at] = data.draw(st.sampled_from([b"\\u0000", b"-", b"1e2", b"NaN", b" "]))
    agree(raw_file(bytes(header), bytes(26)))


@given(st.binary(max_size=64))
@example(b"{}")
@example(b'{"a":' * 30)
@example(b"\xef\xbb\xbf{}")
def test_noise(header: bytes) -> None:
    """Nothing is accepted but a file without tensors, which some shards are."""
    assert agree(raw_file(header)) == (header.rstrip(b" \n\r\t") == b"{}")
