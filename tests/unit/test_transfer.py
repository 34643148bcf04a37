"""The transfer against sessions that end their reads when the test says so."""

from __future__ import annotations

import threading

import pytest

from mx.core.holdings import members
from mx.core.pages import Pages
from mx.errors import ClosedError, DigestError, LocalError, PeerLostError
from mx.fetching.report import VerifiedBy
from mx.fetching.transfer import Transfer
from mx.transport import View
from mx.units import MIB
from tests.support.held_sessions import (
    BYTES,
    PAGE,
    SHORTCUTS,
    HeldSession,
    Lease,
    Listener,
    connection_of,
    manifest_of_three_chunks,
)


class Setting:
    def __init__(self, *, page: bool = True, shortcut: bool = False) -> None:
        self.manifest = manifest_of_three_chunks()
        pages = Pages.whole(self.manifest, [PAGE]) if page else Pages(self.manifest)
        self.arena = bytearray(self.manifest.layout.arena_nbytes)
        self.listener = Listener()
        self.transfer = Transfer(
            self.manifest, pages, memoryview(self.arena), self.listener, shortcut=shortcut
        )
        self.transfer.start()

    def connection(self, lease: Lease | None = None, vouched: bytes | None = None) -> HeldSession:
        session = HeldSession()
        self.transfer.add_connection(connection_of(session, lease, vouched))
        return session


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_chunk_is_read_by_one_session_at_a_time(setting: Setting) -> None:
    """A session that was given up may still write: no other session's bytes may lie there."""
    first = setting.connection()
    assert len(first.reads) == 3
    second = setting.connection()
    setting.transfer.connection_lost(0, PeerLostError("gone"))
    assert first.closed
    assert second.reads == []
    first.land()  # what it had read by then is as good as any
    assert second.reads == []
    first.fail(ClosedError("closed"))
    assert [read.tag for read in second.reads] == ["chunk 1"]
    first.fail(ClosedError("closed"))
    assert [read.tag for read in second.reads] == ["chunk 1", "chunk 2"]
    second.land()
    second.land()
    assert setting.transfer.holdings.whole
    assert setting.listener.lost == [0]
    assert setting.arena[: len(BYTES)] == BYTES
    assert setting.transfer.progress() == (len(BYTES), [len(BYTES)])
    (path,) = setting.transfer.paths()  # both were of one path
    assert (path.source, path.bytes) == ("peer", len(BYTES))


def test_a_session_s_round_trip_counts_from_its_next_read_on(setting: Setting) -> None:
    session = setting.connection()
    session.round_trip_s = 0.25
    session.land()
    (connection,) = setting.transfer.connections
    assert connection.load is not None
    assert connection.load.round_trip_s == 0.25


def test_a_session_that_refuses_reads_is_lost_and_holds_on_to_nothing(setting: Setting) -> None:
    refusing = HeldSession()
    refusing.closed = True
    setting.transfer.add_connection(connection_of(refusing))
    assert setting.listener.lost == [0]
    good = setting.connection()
    for _ in range(3):
        good.land()
    assert setting.transfer.holdings.whole
    setting.transfer.close()
    assert setting.transfer.join(30)
    setting.arena.extend(b"no view is left")  # BufferError if a view is left


def test_bytes_past_a_lease_are_not_believed_whatever_the_source_says(setting: Setting) -> None:
    lease = Lease()
    session = setting.connection(lease)
    lease.error = DigestError("a source may claim this too")
    session.land()
    assert setting.listener.lost == [0]
    assert setting.listener.ready == []
    assert session.closed


def test_an_unexpected_exception_ends_the_pull(setting: Setting) -> None:
    setting.listener.raises = KeyError("unforeseen")
    session = setting.connection()
    for _ in range(3):
        session.land()
    assert isinstance(setting.listener.broke, LocalError)
    assert "unforeseen" in str(setting.listener.broke)
    assert setting.listener.broke.__cause__ is setting.listener.raises


def test_a_closed_transfer_reports_no_outcome(setting: Setting) -> None:
    session = setting.connection()
    setting.transfer.no_more_connections()
    setting.transfer.close()
    for _ in range(3):
        session.fail(ClosedError("closed"))
    assert setting.listener.causes == ()
    assert setting.transfer.join(30)


class Chunks:
    """A listener of single chunks."""

    def __init__(self) -> None:
        self.landed: list[int] = []

    def chunk_verified(self, chunk: int) -> None:
        self.landed.append(chunk)

    def chunk_corrupt(self, chunk: int, source: str) -> None:
        raise AssertionError("no chunk is wrong")


def test_prefilled_chunks_are_not_read(setting: Setting) -> None:
    transfer, chunks = setting.transfer, Chunks()
    assert transfer.subscribe(chunks) == 0
    setting.arena[: 2 * MIB] = BYTES[: 2 * MIB]
    assert transfer.prefill("resume", "/some/folder", [0, 1], 0.5) == 2 * MIB
    assert transfer.prefill("reuse", "another model", [1, 0]) == 0
    assert transfer.progress() == (2 * MIB, [2 * MIB])
    session = setting.connection()
    assert [read.tag for read in session.reads] == ["chunk 2"]
    assert transfer.prefill("reuse", "another model", [2]) == 0  # a connection may write there now
    session.land()
    assert setting.transfer.holdings.whole
    assert setting.listener.ready == [0]
    assert chunks.landed == [0, 1, 2]
    assert setting.arena[: len(BYTES)] == BYTES
    assert [(p.transport, p.source, p.bytes) for p in transfer.paths()] == [
        ("held", "peer", MIB),
        ("resume", "/some/folder", 2 * MIB),
    ]


def test_a_subscriber_knows_of_every_chunk_whenever_it_comes(setting: Setting) -> None:
    """Chunks prefilled or read before are in its snapshot; later ones are reported to it."""
    transfer, chunks = setting.transfer, Chunks()
    setting.arena[:MIB] = BYTES[:MIB]
    transfer.prefill("resume", "/some/folder", [0])
    session = setting.connection()
    session.land()
    assert transfer.subscribe(chunks) == 0b11
    assert chunks.landed == []
    session.land()
    assert chunks.landed == [2]
    assert transfer.subscribe(Chunks()) == 0b111


def test_a_chunk_that_lands_during_a_subscription_is_reported_once() -> None:
    for _ in range(200):
        setting, chunks = Setting(), Chunks()
        session = setting.connection()
        begin = threading.Barrier(2)

        def land(session: HeldSession = session, begin: threading.Barrier = begin) -> None:
            begin.wait()
            for _ in range(3):
                session.land()

        landing = threading.Thread(target=land)
        landing.start()
        begin.wait()
        found = setting.transfer.subscribe(chunks)
        landing.join()
        assert sorted([*members(found), *chunks.landed]) == [0, 1, 2]


def test_the_last_chunk_is_reported_before_the_end(setting: Setting) -> None:
    """When a pull is complete, its readers can already read all of it."""
    chunks = Chunks()
    setting.transfer.subscribe(chunks)
    known_at_end: list[list[int]] = []
    setting.listener.layer_ready = lambda layer, arena, by: known_at_end.append(  # type: ignore[method-assign]
        list(chunks.landed)
    )
    session = setting.connection()
    for _ in range(3):
        session.land()
    assert known_at_end == [[0, 1, 2]]


def test_a_prefilled_model_needs_no_connection(setting: Setting) -> None:
    assert setting.transfer.prefill("resume", "/some/folder", [2, 1, 0, 2]) == len(BYTES)
    assert setting.transfer.holdings.whole
    assert setting.listener.ready == [0]
    assert setting.transfer.holdings.whole


def test_layers_wait_for_their_page_alone() -> None:
    setting = Setting(page=False)
    session = setting.connection()
    for _ in range(3):
        session.land()
    assert setting.listener.ready == []
    assert setting.transfer.progress() == (len(BYTES), [len(BYTES)])
    setting.transfer.put_page(0, PAGE)
    assert setting.listener.ready == [0]
    assert setting.listener.verified_by == [VerifiedBy.DIGEST]


def test_wrong_bytes_are_never_delivered_and_their_sender_is_dropped() -> None:
    setting = Setting()
    liar, honest = setting.connection(), setting.connection()
    setting.transfer.no_more_connections()
    lies = bytes(len(BYTES))
    liar.land(lies)
    liar.land(lies)
    assert setting.listener.lost == [0]
    while liar.reads:
        liar.fail(ClosedError("closed"))
    while honest.reads:
        honest.land()
    assert setting.listener.ready == [0]
    assert setting.arena[: len(BYTES)] == BYTES


def test_the_shortcut_is_used_only_where_it_is_allowed_and_vouched_for() -> None:
    for shortcut, vouched, by in (
        (True, SHORTCUTS, VerifiedBy.SHORTCUT),
        (False, SHORTCUTS, VerifiedBy.DIGEST),
        (True, None, VerifiedBy.DIGEST),
        (True, SHORTCUTS[:-1], VerifiedBy.DIGEST),  # of another model
    ):
        setting = Setting(page=False, shortcut=shortcut)
        session = setting.connection(vouched=vouched)
        for _ in range(3):
            session.land()
        assert bool(setting.listener.ready) == (by is VerifiedBy.SHORTCUT)
        setting.transfer.put_page(0, PAGE)
        assert setting.listener.verified_by == [by]


def test_blake3_decides_where_the_shortcut_does_not_agree() -> None:
    """The digests that are vouched for may be the wrong ones, as after a fault at the source."""
    setting = Setting(shortcut=True)
    session = setting.connection(vouched=bytes(len(SHORTCUTS)))
    for _ in range(3):
        session.land()
    assert setting.listener.verified_by == [VerifiedBy.DIGEST]
    assert setting.arena[: len(BYTES)] == BYTES
    again = Setting(shortcut=True)
    session = again.connection(vouched=bytes(len(SHORTCUTS)))
    again.transfer.no_more_connections()
    session.land(bytes(len(BYTES)))
    session.land(bytes(len(BYTES)))
    assert again.listener.ready == []
    assert again.listener.lost == [0]


def test_a_source_that_is_excluded_for_good_while_it_connects_is_not_read_from() -> None:
    setting = Setting()
    connecting = connection_of(HeldSession())
    lie = DigestError("the page is of another model", peer="peer")
    setting.transfer.exclude(connecting.path.source.key, lie, for_good=True)
    assert connecting.path.source.key in setting.transfer.excluded
    with pytest.raises(DigestError, match="of another model"):
        setting.transfer.add_connection(connecting)
    assert setting.connection().reads  # another's


def test_join_waits_for_a_layer_that_a_page_has_made_ready_and_not_for_ever() -> None:
    setting = Setting(page=False)
    session = setting.connection()
    while session.reads:
        session.land()
    entered, go_on = threading.Event(), threading.Event()

    def ready(layer: int, arena: View, by: VerifiedBy) -> None:
        entered.set()
        assert go_on.wait(60)

    setting.listener.layer_ready = ready  # type: ignore[method-assign]
    putting = threading.Thread(target=setting.transfer.put_page, args=(0, PAGE))
    putting.start()
    assert entered.wait(60)
    setting.transfer.close()
    assert not setting.transfer.join(0.05)
    go_on.set()
    assert setting.transfer.join(60)
    putting.join()
