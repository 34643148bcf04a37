"""Fakes that mistake what TLS is for."""

from __future__ import annotations

from mx.transport import TlsFiles
from tests.support.broken.base import BrokenFake, transport


@transport("encrypts")
class IgnoresTls(BrokenFake):
    """Sends in the clear, whatever files there are, and asks for no certificate."""

    def admits_reader(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        del source, reader
        return True

    def trusts_source(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        del source, reader
        return True

    def send(self, data: memoryview, tls: TlsFiles | None) -> None:
        del tls
        super().send(data, None)


@transport("encrypts")
class SendsInTheClear(BrokenFake):
    """Compares certificates, and encrypts nothing."""

    def send(self, data: memoryview, tls: TlsFiles | None) -> None:
        del tls
        super().send(data, None)


@transport("encrypts")
class AdmitsAnyReader(BrokenFake):
    """Its sources ask for no certificate."""

    def admits_reader(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        del source, reader
        return True


@transport("encrypts")
class AdmitsAnyCertificate(BrokenFake):
    """Its sources ask for a certificate, of any authority."""

    def admits_reader(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        return source is None or reader is not None


@transport("encrypts")
class TrustsAnyCertificate(BrokenFake):
    """Its readers ask for a certificate, of any authority."""

    def trusts_source(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        return reader is None or source is not None


@transport("encrypts")
class TrustsAnyHost(BrokenFake):
    """Its readers ask for a certificate, of any host."""

    def is_at(self, peer: str) -> bool:
        del peer
        return True


@transport("encrypts")
class AdmitsAnyPrincipal(BrokenFake):
    """Its sources ask for a certificate and a ticket, and not whether they belong together."""

    def is_of(self, principal: str) -> bool:
        del principal
        return True


@transport("encrypts")
class FallsBackToPlain(BrokenFake):
    """Its readers do without TLS where a source has none."""

    def trusts_source(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        return source is None or super().trusts_source(source, reader)
