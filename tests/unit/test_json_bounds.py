"""JSON from elsewhere takes no more memory than a model's own needs, nor the stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.canonical import read_json
from mx.core.json_bounds import MAX_DEPTH, MAX_PARSED_BYTES, check_json
from mx.errors import CheckpointError, ManifestError, PeerProtocolError
from mx.storage.header import parse_header
from mx.storage.shards import weight_map
from mx.units import MIB
from mx.wire.place import place_from_json
from mx_transports.toolkit.framing import decode_ticket
from mx_transports.ucx.wire import decode_info

UNITS = [b"[],", b"{},", b"[0],", b'{"":0},', b'{"":[[]]},', b'"ab",', b"1234,", b'[[[""]]],']


def large(unit: bytes, nbytes: int) -> bytes:
    return b'{"weight_map":[' + unit * (nbytes // len(unit)) + b"0]}"


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_parsed_takes_little(unit: bytes) -> None:
    """In a process of its own: the peak of what a document of 32 MiB takes, beyond itself."""
    code = f"""
from mx.core.canonical import read_json
from mx.errors import ManifestError
unit = {unit!r}
data = b'{{"weight_map":[' + unit * ((32 << 20) // len(unit)) + b"0]}}"
def peak_kib():  # not ru_maxrss: that begins with what the parent held when it forked
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1])
before = peak_kib()
try:
    read_json(data, "index")
except ManifestError:
    pass
print((peak_kib() - before) >> 10)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    copies = 3 * 32  # as text, without escapes, without strings
    assert int(run.stdout) <= MAX_PARSED_BYTES // MIB + copies


@pytest.mark.parametrize("unit", UNITS[:4])
def test_many_values_are_refused_wherever_json_is_read(unit: bytes) -> None:
    data = large(unit, 24 * MIB)
    with pytest.raises(ManifestError, match="more values"):
        read_json(data, "packaging")
    with pytest.raises(CheckpointError, match="more values"):
        parse_header(data, Path("a.safetensors"), 0)
    with pytest.raises(CheckpointError, match="more values"):
        weight_map(data, "model.safetensors.index.json")
    with pytest.raises(ValueError, match="more values"):
        place_from_json(data.decode())
    for decode in (decode_ticket, decode_info):
        with pytest.raises(PeerProtocolError):
            decode(large(unit, 4 * MIB), "10.0.0.1:1")


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_nesting_is_refused(opening: str) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"a":': "}]"}[opening]
    for depth in (10 * MAX_DEPTH, 100_000):
        text = '{"weight_map":' + opening * depth + "0" + closing * depth + "}"
        with pytest.raises(ManifestError, match="deep"):
            read_json(text.encode(), "index")
        with pytest.raises(CheckpointError, match="deep"):
            parse_header(text.encode(), Path("a.safetensors"), 0)
        with pytest.raises(ValueError, match="deep"):
            place_from_json(text)


def test_what_a_large_model_needs_is_read() -> None:
    header = {
        f"model.layers.{i // 100}.experts.{i % 100}.weight": {
            "dtype": "BF16",
            "shape": [4096, 4096],
            "data_offsets": [i << 25, (i + 1) << 25],
        }
        for i in range(150_000)
    }
    check_json(json.dumps(header).encode())
    check_json(json.dumps({"kind": list(range(1_000_000))}).encode())
    check_json(
        json.dumps({"weight_map": {f"w{i}": "a.safetensors" for i in range(1_000_000)}}).encode()
    )


def test_what_is_in_strings_is_text() -> None:
    text = "[{,:" * (4 * MIB) + '"\\' + "]" * 10
    assert read_json(json.dumps({"a": text}).encode(), "index") == {"a": text}


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
)
def test_ordinary_json_passes(value: object) -> None:
    check_json(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


@given(st.binary(max_size=200), st.integers(1, 2000))
def test_any_bytes_are_looked_over(data: bytes, times: int) -> None:
    try:
        check_json(data * times)
    except ValueError:
        return
