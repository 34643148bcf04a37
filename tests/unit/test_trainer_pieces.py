"""Which bytes of a model each rank of a trainer has: cut, described, and put together again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec, plan_layout
from mx.errors import ClosedError, ManifestError, MxError, PeerLostError, PeerProtocolError
from mx.trainers.pieces import (
    PartDocument,
    PartPiece,
    PartSpan,
    TensorForm,
    cut,
    edges,
    forms_of,
    pieces_of,
    spans_of,
)
from mx.trainers.reading import PartAddress, PartsTicket
from mx.trainers.session import PartsMap, PartsSession
from mx.transport import Piece, Read, host_view

#: Around a few blocks.
sizes = st.integers(0, 3 * BLOCK_BYTES + 5)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Return the size of a tensor, and ranges of it that cover it, some of them twice."""
    nbytes = draw(sizes)
    places = st.one_of(st.integers(0, nbytes), st.sampled_from([n * BLOCK_BYTES for n in range(4)]))
    bounds = sorted({0, nbytes, *(min(at, nbytes) for at in draw(st.lists(places, max_size=5)))})
    ranges = list(itertools.pairwise(bounds))
    return nbytes, ranges + draw(
        st.lists(st.sampled_from(ranges), max_size=3) if ranges else st.just([])
    )


@given(sharded())
def test_pieces_are_cut_where_blocks_are(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    nbytes, ranges = drawn
    for begin, end in ranges:
        pieces = list(cut("w", begin, end, nbytes))
        assert [begin, *(each.end for each in pieces)] == [*(each.begin for each in pieces), end]
        assert len(pieces) <= 3
        for piece in pieces:
            whole = piece.end // BLOCK_BYTES - -(-piece.begin // BLOCK_BYTES)
            # What begins in a block has no whole block after that.
            assert not piece.begin % BLOCK_BYTES or whole <= 0


@given(sharded())
def test_all_bytes_are_found_once(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    nbytes, ranges = drawn
    parts = [list(cut("w", *each, nbytes)) for each in ranges]
    spans = spans_of({"w": nbytes}, parts)["w"]
    assert [0, *(each.end for each in spans)] == [*(each.begin for each in spans), nbytes]
    whole = set(range(-(-nbytes // BLOCK_BYTES))) - set(edges(spans, nbytes))
    for begin, end, part, index, offset in spans:
        piece = parts[part][index]
        assert piece.begin + offset == begin
        assert piece.end >= end
    for block in whole:
        low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, nbytes)
        assert any(each.begin <= low and each.end >= high for each in spans)


def test_equal_pieces_are_read_in_turns() -> None:
    names = [f"w{number}" for number in range(6)]
    parts = [[PartPiece(name, 0, 8) for name in names] for _ in range(3)]
    spans = spans_of(dict.fromkeys(names, 8), parts)
    assert [spans[name][0].part for name in names] == [0, 1, 2, 0, 1, 2]


def test_missing_and_unknown_bytes_are_refused() -> None:
    with pytest.raises(ManifestError, match="no part has w from byte 4 on"):
        spans_of({"w": 8}, [[PartPiece("w", 0, 4)]])
    with pytest.raises(ManifestError, match="which the model has not"):
        spans_of({"w": 8}, [[PartPiece("w", 0, 9)]])
    with pytest.raises(ManifestError, match="which the model has not"):
        spans_of({"w": 8}, [[PartPiece("v", 0, 8)]])


def test_names_say_where_pieces_belong() -> None:
    specs = [TensorSpec(name, "U8", (4,)) for name in ("a.b#12", "a#b#0", "plain", "x#-1", "y#٣")]
    found = {each for each in pieces_of(plan_layout(specs)) if each is not None}
    assert found == {PartPiece("a.b", 12, 16), PartPiece("a#b", 0, 4)}
    assert PartPiece("a.b", 12, 16).name == "a.b#12"


DOCUMENT = PartDocument(
    1, 2, {"w": TensorForm("BF16", (4, 8)), "n": TensorForm("F32", ())}, {"v": "w"}
)


def test_documents_are_read_as_they_were_written() -> None:
    assert PartDocument.decode(DOCUMENT.encode()) == DOCUMENT
    assert DOCUMENT.tensors["w"].nbytes == 64


@pytest.mark.parametrize(
    "change",
    [
        (b'"format":1', b'"format":2'),
        (b'"rank":1', b'"rank":2'),
        (b'"rank":1', b'"rank":true'),
        (b"BF16", b"BF17"),
        (b"[4,8]", b"[4,-8]"),
        (b"[4,8]", b"[4,1e3]"),
        (b"[4,8]", b"4"),
        (b'"v":"w"', b'"v":"u"'),
        (b'"v":"w"', b'"w":"w"'),
        (b'"v":"w"', b'"v":1'),
        (b"{", b""),
        (b"{", b"[" * 100_000),
    ],
)
def test_other_documents_are_refused(change: tuple[bytes, bytes]) -> None:
    changed = DOCUMENT.encode().replace(*change, 1)
    assert changed != DOCUMENT.encode()
    with pytest.raises(ManifestError):
        PartDocument.decode(changed)


@given(st.binary(max_size=200))
def test_any_document_and_ticket_is_read_or_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        PartDocument.decode(data)
    with pytest.raises(ValueError):
        PartsTicket.decode(data)


def test_parts_that_say_different_things_are_refused() -> None:
    other = DOCUMENT._replace(tensors={**DOCUMENT.tensors, "w": TensorForm("F32", (4, 8))})
    with pytest.raises(ManifestError, match="in another"):
        forms_of([DOCUMENT, other])
    with pytest.raises(ManifestError, match="shares memory"):
        forms_of([DOCUMENT, DOCUMENT._replace(ties={"v": "n"})])
    with pytest.raises(ManifestError, match="in one part only"):
        forms_of([DOCUMENT, DOCUMENT._replace(ties={}, tensors={"v": TensorForm("U8", ())})])
    more = DOCUMENT._replace(tensors={"more": TensorForm("U8", (1,))}, ties={})
    assert forms_of([DOCUMENT, more])[0].keys() == {"w", "n", "more"}


ADDRESS = PartAddress("127.0.0.1:1", "id", "policy", "main", "part=0/1", "00")


def test_tickets_are_read_as_they_were_written() -> None:
    ticket = PartsTicket(3, (ADDRESS, ADDRESS._replace(endpoint="127.0.0.1:2")))
    assert PartsTicket.decode(ticket.encode()) == ticket
    for wrong in (
        b"[3,[]]",
        b'[3,[["a"]]]',
        ticket.encode().replace(b"3", b"true", 1),
        ticket.encode().replace(b'"id"', b"7", 1),
        b" " * (2 << 20) + ticket.encode(),
    ):
        with pytest.raises(ValueError):
            PartsTicket.decode(wrong)


# -- the session that divides reads ----------------------------------------------------------------


class _Session:
    """One part's: reads are kept until the test lands them."""

    def __init__(self, held: bytes) -> None:
        self.held, self.depth, self.closed = held, 2, False
        self.reads: list[Read] = []

    def read(self, reads: list[Read]) -> None:
        if self.closed:
            raise ClosedError("it is closed")
        self.reads += reads

    def land(self, read: Read, nbytes: int) -> None:
        """Fill the first bytes of a read, and say so."""
        left = nbytes
        for piece in read.pieces:
            take = min(left, len(piece.view))
            at = piece.region_offset
            host_view(piece.view)[:take] = self.held[at : at + take]
            left -= take
        read.sink.landed(nbytes)

    def close(self) -> None:
        self.closed = True


class _Lease:
    def __init__(self) -> None:
        self.error: MxError | None = None

    def check(self) -> MxError | None:
        return self.error


class _Connection:
    def __init__(self, held: bytes) -> None:
        self.session, self.lease = _Session(held), _Lease()


class _Sink:
    def __init__(self) -> None:
        self.said: list[object] = []

    def landed(self, nbytes: int) -> None:
        self.said.append(nbytes)

    def done(self) -> None:
        self.said.append("done")

    def failed(self, error: MxError) -> None:
        self.said.append(error)


def divided() -> tuple[PartsSession, list[_Connection], bytes]:
    """Return a session over three parts of one tensor of 30 bytes, and the tensor."""
    whole = bytes(range(30))
    layout = plan_layout([TensorSpec("w", "U8", (30,))])
    ranges = [(0, 10), (10, 20), (20, 30)]
    parts = [plan_layout([TensorSpec(PartPiece("w", *each).name, "U8", (10,))]) for each in ranges]
    spans = {"w": [PartSpan(begin, end, part, 0, 0) for part, (begin, end) in enumerate(ranges)]}
    connections = [_Connection(whole[begin:end]) for begin, end in ranges]
    session = PartsSession(
        PartsMap(layout, spans, parts),
        connections,  # type: ignore[arg-type]
        lambda: lambda timeout_s: True,
    )
    return session, connections, whole


def test_a_read_is_divided_and_its_progress_is_a_prefix() -> None:
    session, (one, two, three), whole = divided()
    room, sink = bytearray(23), _Sink()
    view = memoryview(room)
    pieces = [Piece(0, 5, view[:20]), Piece(0, 27, view[20:])]
    session.read([Read("it", pieces, sink)])
    two.session.land(two.session.reads[0], 10)
    assert sink.said == []  # it comes after what the first part has
    one.session.land(one.session.reads[0], 3)
    assert sink.said == [3]
    one.session.land(one.session.reads[0], 5)
    assert sink.said == [3, 15]
    for each in (two, one):
        each.session.reads[0].sink.done()
    three.session.land(three.session.reads[0], 8)
    three.session.reads[0].sink.done()
    assert sink.said == [3, 15, 23, "done"]
    assert bytes(room) == whole[5:25] + whole[27:]


def test_a_read_fails_once_all_of_it_has_ended() -> None:
    session, (one, two, three), _ = divided()
    sink = _Sink()
    session.read([Read("it", [Piece(0, 0, memoryview(bytearray(30)))], sink)])
    lost = PeerLostError("it is gone")
    two.session.reads[0].sink.failed(lost)
    one.session.reads[0].sink.done()
    assert "done" not in sink.said
    assert lost not in sink.said
    three.session.reads[0].sink.done()
    assert sink.said[-1] is lost
    assert sink.said.count(lost) == 1


def test_what_was_read_after_a_lease_has_ended_does_not_count() -> None:
    session, connections, _ = divided()
    sink = _Sink()
    session.read([Read("it", [Piece(0, 0, memoryview(bytearray(30)))], sink)])
    ended = connections[1].lease.error = PeerLostError("its lease has ended")
    for each in connections:
        each.session.land(each.session.reads[0], 10)
        each.session.reads[0].sink.done()
    assert sink.said[-1] is ended


def test_what_no_part_has_and_empty_reads_end_alone() -> None:
    session, (one, *_), _ = divided()
    sinks = [_Sink() for _ in range(3)]
    session.read(
        [
            Read("beyond", [Piece(0, 25, memoryview(bytearray(10)))], sinks[0]),
            Read("empty", [], sinks[1]),
            Read("right", [Piece(0, 0, memoryview(bytearray(4)))], sinks[2]),
        ]
    )
    assert isinstance(sinks[0].said[0], PeerProtocolError)
    assert sinks[1].said == ["done"]
    one.session.reads[0].sink.done()
    assert sinks[2].said == [4, "done"]


def test_a_closed_session_reads_no_more() -> None:
    session, (one, two, _), _ = divided()
    sink = _Sink()
    two.session.closed = True  # a part of it is closed: its reads fail, and the others' end
    session.read([Read("it", [Piece(0, 0, memoryview(bytearray(20)))], sink)])
    assert sink.said == []
    one.session.reads[0].sink.done()
    assert isinstance(sink.said[-1], ClosedError)
    session.close()
    assert one.session.closed
    assert session.join(0.0)
    with pytest.raises(ClosedError):
        session.read([])
