"""Certificates that the openssl command makes. (Where any will do, `mx.testing` has some.)"""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from mx.transport import TlsFiles

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_HERE = "subjectAltName=IP:127.0.0.1,DNS:localhost"


class Authority:
    """An authority, and what it signs: PEM files in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        self._openssl("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", *files)

    def under(self, name: str) -> Authority:
        """Return an authority that this one has signed."""
        self.certificate(name, "basicConstraints=critical,CA:TRUE")
        return Authority.named(self._folder, name)

    @classmethod
    def named(cls, folder: Path, name: str) -> Authority:
        """Return what signs with a certificate of the folder, as if it were an authority's."""
        found = cls.__new__(cls)
        found._folder, found._name = folder, name
        return found

    def certificate(self, name: str, extensions: str = _HERE, days: int = 2) -> TlsFiles:
        """Sign a certificate, with extensions as openssl's configuration has them."""
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        self._openssl("req", *_KEY, "-subj", f"/CN={name}", *files)
        (self._folder / f"{name}.ext").write_text(extensions + "\n")
        signing = ("-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key", "-CAcreateserial")
        made = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
        self._openssl("x509", "-req", "-days", str(days), *signing, *made)
        pem, key, authority = (
            str(self._folder / file) for file in (f"{name}.pem", f"{name}.key", f"{self._name}.pem")
        )
        return TlsFiles(pem, key, authority)

    def postpone(self, files: TlsFiles, by_s: float, for_s: float = 2 * 86400) -> None:
        """Sign a certificate of this authority again, which begins so much later than now, and is
        valid for so long."""
        path, begins = Path(files.certificate), datetime.now(UTC) + timedelta(seconds=by_s)
        before = x509.load_pem_x509_certificate(path.read_bytes())
        key = (self._folder / f"{self._name}.key").read_bytes()
        private: Any = serialization.load_pem_private_key(key, None)
        made = x509.CertificateBuilder(
            before.issuer,
            before.subject,
            before.public_key(),
            x509.random_serial_number(),
            begins,
            begins + timedelta(seconds=for_s),
            list(before.extensions),
        ).sign(private, hashes.SHA256())
        _replace(path, made.public_bytes(serialization.Encoding.PEM))

    def revoke(self, path: Path, *revoked: TlsFiles, for_s: float = 86400, delta: int = 0) -> None:
        """Write a list of revoked certificates, which is valid for so long: a delta of another one
        if `delta` is its number."""
        own = x509.load_pem_x509_certificate((self._folder / f"{self._name}.pem").read_bytes())
        key = (self._folder / f"{self._name}.key").read_bytes()
        private: Any = serialization.load_pem_private_key(key, None)
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder(
            own.subject, now - timedelta(days=1), now + timedelta(seconds=for_s)
        )
        for files in revoked:
            shown = x509.load_pem_x509_certificate(Path(files.certificate).read_bytes())
            entry = x509.RevokedCertificateBuilder(shown.serial_number, now).build()
            builder = builder.add_revoked_certificate(entry)
        if delta:
            builder = builder.add_extension(x509.DeltaCRLIndicator(delta), critical=True)
        made = builder.sign(private, hashes.SHA256())
        _replace(path, made.public_bytes(serialization.Encoding.PEM))

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


def _replace(path: Path, contents: bytes) -> None:
    new = path.with_name(path.name + ".made")
    new.write_bytes(contents)
    new.rename(path)


class Folder:
    """Two authorities, and certificates of them that are wrong in one way each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ours, theirs = Authority(path, "ours"), Authority(path, "theirs")
        here = "subjectAltName=IP:127.0.0.1"
        ours.certificate("good", here)
        ours.certificate("expired", here, days=-1)
        theirs.certificate("foreign", here)
        ours.certificate("nosan", "basicConstraints=CA:FALSE")
        ours.certificate("elsewhere", "subjectAltName=IP:10.9.9.9,DNS:else.example")
        ours.certificate("client", f"{here}\nextendedKeyUsage=clientAuth")

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def used(self, name: str) -> tuple[str, ...]:
        """Put a certificate and its key in the place of the ones that are used, and return their
        flags."""
        for kind in ("pem", "key"):
            new = self.path / f"used.{kind}.new"
            new.write_bytes(self.read(f"{name}.{kind}"))
            new.rename(self.path / f"used.{kind}")
        return self.flags("used")

    def flags(self, name: str, *, key: str = "", authority: str = "ours") -> tuple[str, ...]:
        files = (f"{name}.pem", f"{key or name}.key", f"{authority}.pem")
        flags = ("--tls-cert", "--tls-key", "--tls-ca")
        return tuple(
            word
            for flag, file in zip(flags, files, strict=True)
            for word in (flag, str(self.path / file))
        )
