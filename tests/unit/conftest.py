"""What several unit tests need."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mx.transport import TlsFiles


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles]:
    """Certificates of two unrelated CAs."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make certificates")
    made = []
    for name in ("ours", "theirs"):
        folder: Path = tmp_path_factory.mktemp(name)

        def run(*arguments: str, folder: Path = folder, openssl: str = openssl) -> None:
            subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        run(
            "req",
            "-x509",
            *key,
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-subj",
            "/CN=ca",
            "-days",
            "2",
        )
        run("req", *key, "-keyout", "peer.key", "-out", "peer.csr", "-subj", "/CN=peer")
        run(
            "x509",
            "-req",
            "-in",
            "peer.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            "peer.pem",
            "-days",
            "2",
        )
        made.append(TlsFiles(*(str(folder / f) for f in ("peer.pem", "peer.key", "ca.pem"))))
    return made[0], made[1]
