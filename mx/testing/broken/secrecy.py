"""Fakes that mistake what TLS is for."""

from __future__ import annotations

from mx.testing.broken.base import BrokenFake, transport
from mx.testing.fake import FakeExposure
from mx.transport import Grant, TlsFiles


@transport("encrypts")
class IgnoresTls(BrokenFake):
    """Sends in the clear, whatever files there are, and asks for no certificate."""

    def check_certificate(self, exposure: FakeExposure, grant: Grant) -> None:
        del exposure, grant

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
class AdmitsAnyCertificate(BrokenFake):
    def check_certificate(self, exposure: FakeExposure, grant: Grant) -> None:
        del exposure, grant
