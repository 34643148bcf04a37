"""Messages that the codec accepts, and those that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from mx import codec
from mx.core.types import AddressTable, Intent, ModelKey, Region, SourceRecord
from mx.errors import ConfigError, PeerProtocolError
from mx.wire.v1 import common_pb2 as pb
from mx.wire.v1 import coordinator_pb2 as cpb
from tests.support.records import make_documents, make_record, registration, scattered_rows

DOCUMENTS = make_documents("A")
RECORD = make_record(DOCUMENTS)
U64_MAX = (1 << 64) - 1


def test_a_record_survives_a_round_trip() -> None:
    assert codec.source_from_wire(codec.source_to_wire(RECORD)) == RECORD


def test_where_requests_are_taken_survives_a_round_trip_and_is_a_port() -> None:
    record = replace(RECORD, requests_port=65_535)
    message = codec.source_to_wire(record)
    assert codec.source_from_wire(message) == record
    assert record.requests == "127.0.0.1:65535"
    message.requests_port = 65_536
    with pytest.raises(PeerProtocolError, match="requests_port"):
        codec.source_from_wire(message)


def good() -> cpb.Source:
    return codec.source_to_wire(RECORD)


def hostile(path: str, value: object) -> cpb.Source:
    source = good()
    target: Any = source
    *parents, last = path.split(".")
    for name in parents:
        target = target.regions[0] if name == "region" else getattr(target, name)
    field = getattr(target, last)
    if isinstance(value, list):
        del field[:]
        field.extend(value)
    else:
        setattr(target, last, value)
    return source


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.name", ""),
        ("model.name", "n" * 257),
        ("model.name", "a@b"),
        ("model.name", "a\nb"),
        ("model.name", "a\x00b"),
        ("model.name", " a"),
        ("model.name", "a\u202eb"),
        ("model.revision", "x" * 257),
        ("model.variant", "tp\x1b[31m"),
        ("manifest.identity.digest", b"short"),
        ("manifest.layout.digest", b"x" * 33),
        ("manifest.packaging.digest", b"short"),
        ("manifest.packaging.nbytes", U64_MAX),
        ("endpoint", ""),
        ("endpoint", "host"),
        ("endpoint", "host:0"),
        ("endpoint", "host:65536"),
        ("endpoint", "host:１２"),
        ("endpoint", "dns:///evil:1"),
        ("endpoint", "unix:/var/run/docker.sock"),
        ("endpoint", "::1:80"),
        ("endpoint", "[::zz]:80"),
        ("endpoint", "a b:80"),
        ("place.hostname", "a\x1b[2J"),
        ("place.hostname", "h" * 20_000),
        ("place.pid", -2),
        ("place.addresses", ["10.0.0.1"] * 1025),
        ("place.nics", [pb.Nic(name="a\nb")]),
        ("place.gpus", [pb.Gpu(nvlink_gb_per_s=-1.0)]),
        ("role", 0),
        ("role", 77),
        ("state", 0),
        ("source_id", "not a uuid"),
        ("source_id", "00000000-0000-4000-8000-00000000000A"),
        ("transports", ["tcp", "tcp"]),
        ("transports", ["TCP"]),
        ("transports", [f"t{i}" for i in range(17)]),
        ("table.layout_digest", b"x" * 32),
        ("table.rows", 5),
        ("table.rows", U64_MAX),
        ("table.held", [pb.Range(begin=1, end=1)]),
        ("table.held", [pb.Range(begin=2, end=1)]),
        ("table.held", [pb.Range(begin=0, end=2), pb.Range(begin=1, end=3)]),
        ("table.held", [pb.Range(begin=2, end=3), pb.Range(begin=0, end=1)]),
        ("table.held", [pb.Range(begin=0, end=5)]),
        ("table.held", [pb.Range(begin=i, end=i + 1) for i in range(4097)]),
        ("table.region.index", 1),
        ("table.region.device", "cuda:"),
        ("table.region.device", "gpu\n"),
        ("table.region.nbytes", U64_MAX),
        ("table.region.base", U64_MAX),
        ("table.region.layers.begin", 4),
    ],
)
def test_hostile_sources_are_refused(path: str, value: object) -> None:
    with pytest.raises(PeerProtocolError):
        codec.source_from_wire(hostile(path, value))


def test_a_region_may_end_where_the_address_space_does() -> None:
    source = hostile("table.region.base", (1 << 64) - (1 << 20))
    assert codec.source_from_wire(source).table.regions[0].base == (1 << 64) - (1 << 20)


def test_a_layer_is_in_one_region_only() -> None:
    regions = (Region(0, "cpu", 0, 1, (0, 2)), Region(1, "cpu", 8, 1, (1, 3)))
    table = AddressTable(b"l" * 32, regions)
    with pytest.raises(PeerProtocolError, match="two regions"):
        codec.table_from_wire(codec.table_to_wire(table))


@pytest.mark.parametrize("name", ["", "a@b", "a:b", "a[b", "a\tb", "n" * 257, "a "])
def test_a_bad_name_is_the_callers_mistake(name: str) -> None:
    with pytest.raises(ConfigError):
        codec.check_model_key(ModelKey(name))


@pytest.mark.parametrize("name", ["n" * 256, "Qwen/Qwen3-8B", "模型", "a b", ".."])
def test_good_names(name: str) -> None:
    codec.check_model_key(ModelKey(name))
    assert codec.key_from_wire(codec.key_to_wire(ModelKey(name))) == ModelKey(name)


@given(st.data())
def test_mangled_bytes_decode_or_are_refused(data: st.DataObject) -> None:
    raw = bytearray(good().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = cpb.Source.FromString(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    except DecodeError:
        return
    try:
        record = codec.source_from_wire(message)
    except PeerProtocolError:
        return
    # An accepted record is valid, and survives another round trip.
    assert isinstance(record, SourceRecord)
    assert codec.source_from_wire(codec.source_to_wire(record)) == record


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5),
)
def test_ranges_are_sorted_and_disjoint_or_refused(ranges: list[tuple[int, int]]) -> None:
    numbers = [number for pair in ranges for number in pair]
    is_good = numbers == sorted(numbers) and all(begin < end for begin, end in ranges)
    message = codec.ranges_to_wire(ranges)
    if is_good:
        assert codec.ranges_from_wire(message) == tuple(ranges)
    else:
        with pytest.raises(PeerProtocolError):
            codec.ranges_from_wire(message)


def test_records_do_not_carry_secrets() -> None:
    message = codec.registration_to_wire(registration(RECORD, b"s" * 32, keeps_pin=True))
    assert codec.registration_from_wire(message).intent == Intent(keeps_pin=True)
    assert codec.source_to_wire(codec.source_from_wire(message)).source_secret == b""
    for nbytes in (0, 15, 65):
        with pytest.raises(PeerProtocolError):
            codec.secret_from_wire(b"s" * nbytes)


def test_weights_without_files_survive_a_round_trip() -> None:
    record = replace(make_record(make_documents("bare", files="")), pin_only=True)
    assert record.ref.packaging == b"" and len(record.ref.documents) == 2
    assert codec.source_from_wire(codec.source_to_wire(record)) == record


def test_scattered_sources_may_hold_any_layer() -> None:
    record = make_record(DOCUMENTS, rows=scattered_rows(3), held=((0, 1000),))
    decoded = codec.source_from_wire(codec.source_to_wire(record))
    assert decoded == record


class Counted(int):
    """An int that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) > int(other)

    def __le__(self, other: int) -> bool:
        return not self > other

    def __ge__(self, other: int) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def test_held_layers_are_checked_in_one_pass() -> None:
    count = 2000
    regions = tuple(
        Region(i, "cpu", 0, 1, (Counted(2 * i), Counted(2 * i + 1))) for i in range(count)
    )
    table = AddressTable(b"l" * 32, regions)
    Counted.compared = 0
    codec.check_held(table, [(2 * i, 2 * i + 1) for i in range(count)])
    assert Counted.compared < 40 * count  # sorting included; in pairs they were half of count²


spans = st.lists(st.integers(0, 40), max_size=12, unique=True).map(
    lambda ends: list(zip(*[iter(sorted(ends))] * 2, strict=False))
)


@given(spans, spans)
def test_held_layers_lie_in_regions(
    layers: list[tuple[int, int]], held: list[tuple[int, int]]
) -> None:
    table = AddressTable(
        b"l" * 32, tuple(Region(i, "cpu", 0, 1, span) for i, span in enumerate(layers))
    )
    covered = {layer for begin, end in layers for layer in range(begin, end)}
    fits = all(layer in covered for begin, end in held for layer in range(begin, end))
    if fits:
        codec.check_held(table, held)
    else:
        with pytest.raises(PeerProtocolError, match="no region"):
            codec.check_held(table, held)


def test_tables_are_bounded_in_number_and_sum() -> None:
    regions = [Region(i, "cpu", 0, 1, (i, i + 1)) for i in range(codec.MAX_REGIONS + 1)]
    wire = codec.table_to_wire(AddressTable(b"l" * 32, tuple(regions)))
    with pytest.raises(PeerProtocolError, match=f"more than {codec.MAX_REGIONS} regions"):
        codec.table_from_wire(wire)
    half = codec.MAX_TOTAL_BYTES // 2
    for nbytes, fits in ((half, True), (half + 1, False)):
        two = tuple(Region(i, "cpu", 0, nbytes, (i, i + 1)) for i in range(2))
        wire = codec.table_to_wire(AddressTable(b"l" * 32, two))
        if fits:
            assert codec.table_from_wire(wire).regions == two
        else:
            with pytest.raises(PeerProtocolError, match="more than any memory"):
                codec.table_from_wire(wire)


def test_a_scattered_table_says_how_many_layers_and_bytes_the_model_has() -> None:
    region = Region(0, "cpu", 0x5500_0000_0000, 0x2A00_0000_0000)  # from the heap to a map
    table = AddressTable(b"l" * 32, (region,), layer_count=3, payload_nbytes=1 << 30)
    found = codec.table_from_wire(codec.table_to_wire(table))
    assert found == table and found.nbytes == 1 << 30
    assert replace(table, payload_nbytes=0).nbytes == region.nbytes
    wire = codec.table_to_wire(replace(table, payload_nbytes=codec.MAX_TOTAL_BYTES + 1))
    with pytest.raises(PeerProtocolError, match="more than any memory"):
        codec.table_from_wire(wire)


def test_errors_name_the_field() -> None:
    with pytest.raises(PeerProtocolError, match="identity: a digest has 32 bytes"):
        codec.digest_from_wire(b"short", "identity")
    with pytest.raises(PeerProtocolError, match="gb_per_s: -1 is not"):
        codec.rate_from_wire(-1.0, "gb_per_s")
    with pytest.raises(PeerProtocolError, match="held: .3, 3. is empty"):
        codec.ranges_from_wire([pb.Range(begin=3, end=3)])
