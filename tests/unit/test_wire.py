"""Addresses, statuses and documents, without a network."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx import errors
from mx.core.digest import document_digest
from mx.core.versions import headers
from mx.errors import (
    CapacityError,
    ConfigError,
    CoordinatorError,
    DigestError,
    MxError,
    NotAllowedError,
    PeerLostError,
    PeerProtocolError,
    PeerTimeoutError,
    SourceError,
)
from mx.source.endpoint import require_dialable
from mx.transport import TlsFiles
from mx.wire.address import (
    address_of_peer,
    each_address,
    is_local,
    join_address,
    read_tls,
    require_protection,
    split_address,
)
from mx.wire.documents import PAGE_BYTES, Assembler, pages
from mx.wire.locate import _none_served
from mx.wire.status import DETAIL_KEY, Remote, Role, code_of, encode_detail, translate
from mx.wire.v1 import common_pb2 as pb

COORDINATOR = Remote(Role.COORDINATOR, "10.0.0.1:7600")
SOURCE = Remote(Role.SOURCE, "10.0.0.2:7700")


def rpc_error(
    code: grpc.StatusCode, details: str = "", detail: bytes | None = None
) -> grpc.aio.AioRpcError:
    of_mx: list[tuple[str, str | bytes]]
    of_mx = [(DETAIL_KEY, detail), *headers()] if detail is not None else []
    trailing = grpc.aio.Metadata(*of_mx)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:7600", "127.0.0.1", 7600), ("[::1]:0", "::1", 0), ("a-b.c:1", "a-b.c", 1)],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:x",
        "host:-1",
        "host:99999",
        "::1:1",
        "http://h:1",
        "h:1 ",
        "a..b:1",
        f"{'a' * 64}:1",
    ],
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address)


def test_only_loopback_goes_without_tls() -> None:
    for local in ("127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "unix:/tmp/x"):
        assert is_local(local)
        require_protection(local, tls=None, insecure=False, verb="listen on")
    for remote in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.evil.example:1"):
        assert not is_local(remote)
        with pytest.raises(ConfigError, match="`insecure`"):
            require_protection(remote, tls=None, insecure=False, verb="listen on")
        require_protection(remote, tls=None, insecure=True, verb="listen on")


def test_several_addresses_are_here_if_each_of_them_is() -> None:
    assert each_address("b:1, a:2,b:1") == ("b:1", "a:2")
    assert each_address("unix:/tmp/a,b") == ("unix:/tmp/a,b",)
    assert is_local("127.0.0.1:1,[::1]:2") and not is_local("127.0.0.1:1,10.0.0.1:1")
    require_dialable("127.0.0.1:1", "127.0.0.1:7600,localhost:7600")
    with pytest.raises(ConfigError, match="only this machine reaches"):
        require_dialable("127.0.0.1:1", "127.0.0.1:7600,192.0.2.1:7600")


def test_unreadable_pem_files_are_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"`tls_cert` /nowhere/cert\.pem"):
        read_tls(TlsFiles("/nowhere/cert.pem", "/nowhere/key.pem", "/nowhere/ca.pem"))
    with pytest.raises(ConfigError, match="not a PEM file"):
        read_tls(TlsFiles(__file__, __file__, __file__))


ALL_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MxError)
]

VERSION_ERRORS = (errors.CoordinatorVersionError, errors.PeerVersionError)


@pytest.mark.parametrize("kind", ALL_ERRORS)
@pytest.mark.parametrize("who", [COORDINATOR, SOURCE])
def test_an_error_arrives_with_the_class_it_was_raised_with(
    kind: type[MxError], who: Remote
) -> None:
    error = kind("the message é", hint="the hint")
    raised = translate(rpc_error(code_of(error), "the message", encode_detail(error)), who=who)
    if isinstance(error, errors.LocalError) or kind is MxError:
        # It is the other end's fault, not this process's.
        assert isinstance(raised, CoordinatorError if who is COORDINATOR else SourceError)
        assert not isinstance(raised, errors.LocalError)
    elif kind in VERSION_ERRORS:  # named after the end that reads it
        assert type(raised) is VERSION_ERRORS[who is SOURCE]
        assert (raised.message, raised.hint) == ("the message é", "the hint")
    elif kind is errors.UnknownModelError and who is COORDINATOR:  # which one does not know it
        assert type(raised) is kind
        said = f"the coordinator at {who.address}: the message é"
        assert (raised.message, raised.hint) == (said, "the hint")
    else:
        assert type(raised) is kind
        assert (raised.message, raised.hint) == ("the message é", "the hint")
    if isinstance(raised, SourceError | DigestError):
        assert raised.peer == who.address


@pytest.mark.parametrize(
    ("code", "coordinator", "source"),
    [
        (grpc.StatusCode.UNAVAILABLE, CoordinatorError, PeerLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, CoordinatorError, PeerTimeoutError),
        (grpc.StatusCode.UNAUTHENTICATED, NotAllowedError, errors.PeerRefusedError),
        (grpc.StatusCode.UNIMPLEMENTED, CoordinatorError, PeerProtocolError),
        (grpc.StatusCode.NOT_FOUND, errors.UnknownModelError, errors.UnknownModelError),
        (grpc.StatusCode.ALREADY_EXISTS, errors.BindingError, errors.BindingError),
        (grpc.StatusCode.UNKNOWN, CoordinatorError, PeerProtocolError),
    ],
)
def test_foreign_statuses(
    code: grpc.StatusCode, coordinator: type[MxError], source: type[MxError]
) -> None:
    assert type(translate(rpc_error(code, "said"), who=COORDINATOR)) is coordinator
    assert type(translate(rpc_error(code, "said"), who=SOURCE)) is source
    assert type(translate(rpc_error(code, "said"), who=SOURCE.address)) is source


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls"),
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
    ],
)
def test_what_a_stopping_server_cuts_off_is_called_so(code: grpc.StatusCode, said: str) -> None:
    for who, kind in ((COORDINATOR, CoordinatorError), (SOURCE, PeerLostError)):
        found = translate(rpc_error(code, said), who=who)
        assert type(found) is kind
        assert said not in found.message and who.address in found.message


@pytest.mark.parametrize(
    "said",
    [
        "errors resolving a.example:1: [field:hostname lookup error:address lookup failed for "
        "a.example:1: Domain name not found]",
        "DNS resolution failed for a.example:1: C-ares status is not ARES_SUCCESS",
        "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:1: Failed "
        "parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
    ],
)
def test_unknown_names_and_other_servers_are_not_silent_ones(said: str) -> None:
    absent = translate(rpc_error(grpc.StatusCode.UNAVAILABLE, "refused"), who=COORDINATOR)
    for who, kinds in ((COORDINATOR, CoordinatorError), (SOURCE, errors.SourceError)):
        error = translate(rpc_error(grpc.StatusCode.UNAVAILABLE, said), who=who)
        assert isinstance(error, kinds) and error.exit_code == errors.EXIT_NO_SOURCE
        assert error.hint != absent.hint and said not in error.message


def test_a_process_that_is_no_source_may_be_a_coordinator() -> None:
    error = translate(rpc_error(grpc.StatusCode.UNIMPLEMENTED, "no method"), who=SOURCE)
    assert "is not an mx source" in error.message and "`coordinator`" in error.hint


def test_a_stream_that_is_removed_was_closed() -> None:
    said = "Stream removed (Delayed close due to in-progress write (Socket closed))"
    for who in (COORDINATOR, SOURCE):
        error = translate(rpc_error(grpc.StatusCode.UNAVAILABLE, said), who=who)
        assert error.message.endswith(": it closed the connection")


def test_sources_that_do_not_answer_are_named_once_with_one_hint() -> None:
    lost = [translate(rpc_error(grpc.StatusCode.UNAVAILABLE, "refused"), who=SOURCE)]
    error = _none_served("side files", "llama", lost)
    assert str(error) == (
        "no source of llama answers: the source at 10.0.0.2:7700 does not answer: refused "
        "(mx sources shows who is registered)"
    )
    other = _none_served("side files", "llama", [*lost, errors.UnknownModelError("none here")])
    assert isinstance(other, errors.NoSourceError) and "none here" in other.message


def test_the_error_for_an_absent_coordinator_says_what_to_do() -> None:
    error = translate(rpc_error(grpc.StatusCode.UNAVAILABLE, "refused"), who=COORDINATOR)
    assert "no coordinator answers at 10.0.0.1:7600" in str(error)
    assert "mx-coordinator" in error.hint and "`coordinator`" in error.hint


@given(st.binary(max_size=60) | st.sampled_from([b"[]", b"{}", b'{"error": "os"}', b"[" * 9999]))
def test_hostile_details_are_ignored(detail: bytes) -> None:
    error = translate(rpc_error(grpc.StatusCode.NOT_FOUND, "said", detail), who=COORDINATOR)
    assert type(error) is errors.UnknownModelError


def test_a_detail_names_only_mx_errors() -> None:
    detail = b'{"error": "annotations", "message": "m"}'
    error = translate(rpc_error(grpc.StatusCode.NOT_FOUND, "said", detail), who=SOURCE)
    assert "said" in error.message


BIG = bytes(range(256)) * 9000  # three pages


def assembler(*documents: bytes) -> Assembler:
    return Assembler([(document_digest(d), len(d)) for d in documents], who="peer")


def test_documents_arrive_interleaved() -> None:
    target = assembler(BIG, b"", b"small")
    sent = [list(pages(document_digest(d), d)) for d in (BIG, b"", b"small")]
    assert [len(s) for s in sent] == [3, 1, 1]
    for page in (sent[0][0], sent[2][0], sent[0][1], sent[1][0], sent[0][2]):
        target.add(page)
    assert target.missing == []
    assert set(target.documents.values()) == {BIG, b"", b"small"}


def page_of(offset: int, data: bytes, *, nbytes: int = len(BIG), of: bytes = BIG) -> pb.Page:
    return pb.Page(digest=document_digest(of), offset=offset, nbytes=nbytes, data=data)


@pytest.mark.parametrize(
    "lie",
    [
        page_of(1, b"x"),  # a gap
        page_of(PAGE_BYTES, b"x"),
        page_of(0, b"x" * (PAGE_BYTES + 1)),
        page_of(0, b""),
        page_of(0, b"x", nbytes=5),
        page_of(0, b"x", of=b"not asked for"),
        page_of((1 << 64) - 1, b"x"),
    ],
)
def test_lying_pages_are_refused(lie: pb.Page) -> None:
    with pytest.raises(PeerProtocolError):
        assembler(BIG).add(lie)


def test_overlap_excess_repeats_and_wrong_bytes_are_refused() -> None:
    target = assembler(BIG)
    first = page_of(0, BIG[:PAGE_BYTES])
    target.add(first)
    with pytest.raises(PeerProtocolError):
        target.add(first)
    target.add(page_of(PAGE_BYTES, BIG[PAGE_BYTES : 2 * PAGE_BYTES]))
    with pytest.raises(PeerProtocolError, match="longer"):
        target.add(page_of(2 * PAGE_BYTES, b"x" * PAGE_BYTES))
    with pytest.raises(DigestError) as caught:
        target.add(page_of(2 * PAGE_BYTES, b"x" * (len(BIG) - 2 * PAGE_BYTES)))
    assert caught.value.peer == "peer"
    small = assembler(b"small")
    page = next(iter(pages(document_digest(b"small"), b"small")))
    small.add(page)
    with pytest.raises(PeerProtocolError, match="twice"):
        small.add(page)


def test_refs_are_checked_before_anything_is_held() -> None:
    with pytest.raises(CapacityError):
        Assembler([(b"d" * 32, 1 << 40)], who="peer")
    with pytest.raises(PeerProtocolError):
        Assembler([(b"d" * 31, 1)], who="peer")
    with pytest.raises(PeerProtocolError):
        Assembler([(b"d" * 32, 1), (b"d" * 32, 2)], who="peer")


def test_pages_go_to_write_and_are_not_kept() -> None:
    documents = [bytes(range(256)) * 8192, b"", b"x"]
    refs = [(document_digest(d), len(d)) for d in documents]
    found: dict[bytes, bytes] = {}

    def write(digest: bytes, offset: int, data: bytes) -> None:
        assert offset == len(found.get(digest, b""))
        found[digest] = found.get(digest, b"") + data

    assembler = Assembler(refs, who="peer", write=write)
    for (digest, _), data in zip(refs, documents, strict=True):
        assert digest in assembler.missing
        for page in pages(digest, data):
            assembler.add(page)
    assert assembler.missing == []
    assert [found[digest] for digest, _ in refs] == documents
    assert set(assembler.documents.values()) == {b""}


def test_wrong_bytes_that_went_to_write_are_reported() -> None:
    assembler = Assembler([(b"d" * 32, 3)], who="peer", write=lambda *_: None)
    with pytest.raises(DigestError):
        assembler.add(pb.Page(digest=b"d" * 32, offset=0, nbytes=3, data=b"abc"))
    assert assembler.missing == [b"d" * 32]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:50123", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:50123", "2001:db8:1:2::/64"),
        ("ipv6:[fe80::1%25eth0]:1", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "10.0.0.7"),
        ("unix:/run/mx", "unix"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_the_address_of_a_peer_leaves_out_the_parts_that_it_can_choose(
    peer: str, address: str
) -> None:
    assert address_of_peer(peer) == address
