"""Data connections over TLS: whose grant it is, whose server it is, certificates that change."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.errors import PeerRefusedError, SourceError
from mx.testing.bench import Bench, BenchSource
from mx.testing.harness import Harness
from mx.transport import Authenticating, Session, TlsFiles
from mx.units import KIB
from mx_transports.toolkit import tls
from mx_transports.toolkit.tls import tls_context
from tests.support.certificates import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")

READER = "spiffe://mx.test/reader"
HERE = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ca")


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(Harness("mx_transports.tcp:TcpTransport", stall_timeout_s=2.0)) as made:
        yield made


def member(authority: Authority, name: str, uri: str) -> TlsFiles:
    return authority.certificate(name, f"subjectAltName=URI:{uri}")


def granted(source: BenchSource, principal: str) -> tuple[str, bytes]:
    """A ticket for a principal."""
    grant_id, ticket = source.grant()
    assert isinstance(source.exposure, Authenticating)
    source.exposure.bind(grant_id, principal)
    return grant_id, ticket


def reads(bench: Bench, session: Session, source: BenchSource) -> None:
    view = bench.destination(64 * KIB)
    bench.succeed(bench.read(session, 0, 0, view))
    assert bench.peek(view) == source.memories[0].expected


def test_a_grant_is_of_the_certificate_that_opened_it(bench: Bench, authority: Authority) -> None:
    source = bench.source(64 * KIB, tls=authority.certificate("source", HERE))
    reader, renewed = (member(authority, name, READER) for name in ("reader", "renewed"))
    other = member(authority, "other", "spiffe://mx.test/other")
    unnamed = authority.certificate("unnamed", "basicConstraints=CA:FALSE")
    several = authority.certificate(
        "several", f"subjectAltName=URI:{READER},URI:spiffe://mx.test/o"
    )
    grant_id, ticket = granted(source, READER)
    for stranger in (other, unnamed, several):
        with pytest.raises(PeerRefusedError, match="another certificate"):
            bench.open_ticket(grant_id, ticket, source.sizes, tls=stranger)
    for same in (reader, renewed):
        reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=same), source)
    with pytest.raises(SourceError, match="TLS failed|gone"):
        bench.open_ticket(grant_id, ticket, source.sizes, tls=None)


def test_a_server_is_read_from_where_its_certificate_names_the_endpoint(
    bench: Bench, authority: Authority
) -> None:
    source = bench.source(
        64 * KIB, tls=authority.certificate("elsewhere", "subjectAltName=DNS:else.example")
    )
    grant_id, ticket = granted(source, READER)
    with pytest.raises(PeerRefusedError, match="(?i)hostname mismatch"):
        bench.open_ticket(grant_id, ticket, source.sizes, tls=member(authority, "target", READER))


def replace(files: TlsFiles, by: TlsFiles) -> None:
    for one, other in (
        (files.certificate, by.certificate),
        (files.key, by.key),
        (files.authority, by.authority),
    ):
        new = Path(one + ".new")
        shutil.copyfile(other, new)
        new.rename(one)


def test_certificates_are_replaced_under_a_session(
    bench: Bench, authority: Authority, tmp_path: Path
) -> None:
    later = Authority(tmp_path, "later")
    files = TlsFiles(*(str(tmp_path / f"used.{kind}") for kind in ("pem", "key", "ca")))
    of_reader = TlsFiles(*(str(tmp_path / f"reader.{kind}") for kind in ("pem", "key", "ca")))
    replace(files, authority.certificate("before", HERE))
    replace(of_reader, member(authority, "reader-before", READER))
    source = bench.source(64 * KIB, tls=files)
    grant_id, ticket = granted(source, READER)
    running = bench.open_ticket(grant_id, ticket, source.sizes, tls=of_reader)
    reads(bench, running, source)

    replace(files, later.certificate("after", HERE))
    reads(bench, running, source)
    with pytest.raises(SourceError):  # of the authority before
        bench.open_ticket(grant_id, ticket, source.sizes, tls=of_reader)
    replace(of_reader, member(later, "reader-after", READER))
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=of_reader), source)

    Path(files.key).write_text("half")  # while it is being written
    Path(of_reader.certificate).write_text("")
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=of_reader), source)
    reads(bench, running, source)


def test_what_is_not_valid_yet_is_shown_once_it_is(
    bench: Bench, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "AGAIN_S", 0.1)
    files = TlsFiles(*(str(tmp_path / f"used.{kind}") for kind in ("pem", "key", "ca")))
    replace(files, authority.certificate("begun", HERE))
    source, reader = bench.source(64 * KIB, tls=files), member(authority, "reader-now", READER)
    grant_id, ticket = granted(source, READER)
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=reader), source)
    before = tls_context(files, server=True)
    soon = authority.certificate("soon", HERE)
    authority.postpone(soon, 3.0)
    replace(files, soon)
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=reader), source)
    deadline_s = time.monotonic() + 60.0
    while tls_context(files, server=True) is before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=reader), source)


def test_a_revoked_certificate_is_refused_at_both_ends(
    bench: Bench, authority: Authority, tmp_path: Path
) -> None:
    served, reader = authority.certificate("source", HERE), member(authority, "reader", READER)
    crl = tmp_path / "crl.pem"
    authority.revoke(crl)
    listing, checking = (
        TlsFiles(each.certificate, each.key, each.authority, str(crl)) for each in (served, reader)
    )
    source = bench.source(64 * KIB, tls=listing)
    grant_id, ticket = granted(source, READER)
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=checking), source)
    authority.revoke(crl, reader)
    with pytest.raises(PeerRefusedError, match="another certificate"):
        bench.open_ticket(grant_id, ticket, source.sizes, tls=reader)
    authority.revoke(crl, served)
    reads(bench, bench.open_ticket(grant_id, ticket, source.sizes, tls=reader), source)
    with pytest.raises(PeerRefusedError, match="its certificate is revoked"):
        bench.open_ticket(grant_id, ticket, source.sizes, tls=checking)
