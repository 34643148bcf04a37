"""What several unit tests need."""

import pytest

from mx.testing.certificates import certificates
from mx.transport import TlsFiles


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles]:
    """Certificates of two unrelated authorities."""
    return certificates(tmp_path_factory.mktemp("certificates"))
