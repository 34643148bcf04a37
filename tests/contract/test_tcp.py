"""The tcp transport keeps the rules, plain and over TLS, for memory in one place and in many."""

import pytest

from mx.testing.certificates import certificates
from mx.testing.conformance import Harness, Kind, TransportSuite
from mx.transport import TlsFiles

TARGET = "mx_transports.tcp:TcpTransport"


class TestTcp(TransportSuite):
    @pytest.fixture(params=[Kind.SEALED, Kind.SCATTERED])
    def harness(self, request: pytest.FixtureRequest) -> Harness:
        return Harness(TARGET, kind=request.param)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return certificates(tmp_path_factory.mktemp("tls"))[0]


class TestTls(TransportSuite):
    @pytest.fixture
    def harness(self, files: TlsFiles) -> Harness:
        return Harness(TARGET, kind=Kind.SCATTERED, tls=files)
