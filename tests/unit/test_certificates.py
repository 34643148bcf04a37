"""Certificates that lead to an authority, or do not any more."""

from __future__ import annotations

import math
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import Certificate

from mx.core.certificates import (
    Revocations,
    certificates_in,
    read_revocations,
    validity,
)
from mx.errors import ConfigError
from mx.transport import TlsFiles
from tests.support.certificates import Authority

NONE = Revocations()

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def is_signed(shown: list[bytes], by: frozenset[Certificate]) -> bool:
    return validity(shown, by, Revocations()).until_s > -math.inf


def test_certificates_lead_to_authorities(tmp_path: Path) -> None:
    root, other = Authority(tmp_path, "root"), Authority(tmp_path, "other")
    between = root.under("between")
    root.certificate("plain")
    between.certificate("below")
    root.certificate("member")
    Authority.named(tmp_path, "member").certificate("by-member")
    other.certificate("stranger")

    def shown(*names: str) -> list[bytes]:
        return [(tmp_path / f"{name}.pem").read_bytes() for name in names]

    trusted = certificates_in(b"# both\n" + b"".join(shown("root", "plain")) + b"-----BEGIN")
    assert len(trusted) == 2
    good: list[tuple[str, ...]] = [("plain",), ("member",), ("below", "between")]
    for chain in (*good, ("below", "other", "between")):
        assert is_signed(shown(*chain), trusted)
    for chain in (
        ("stranger",),
        ("below",),
        ("stranger", "between"),
        ("by-member", "member"),  # which is not an authority
        ("below", *["other"] * 8, "between"),
        (),
    ):
        assert not is_signed(shown(*chain), trusted)
    assert is_signed(shown("below"), certificates_in(*shown("between")))
    assert not is_signed([b"nothing", *shown("member")], trusted)


def test_a_certificate_is_valid_until_the_way_to_its_authority_is_not(tmp_path: Path) -> None:
    root = Authority(tmp_path, "root")
    between = root.under("between")
    below, plain = between.certificate("below"), root.certificate("plain")
    trusted = certificates_in((tmp_path / "root.pem").read_bytes())

    def until_s(name: str, *more: str, revoked: Revocations = NONE) -> float:
        shown = [(tmp_path / f"{each}.pem").read_bytes() for each in (name, *more)]
        found = validity(shown, trusted, revoked)
        assert found.revoked == (bool(revoked.serials) and found.until_s == -math.inf)
        return found.until_s

    now_s = time.time()
    root.postpone(plain, -5, for_s=65)
    assert until_s("plain") == pytest.approx(now_s + 60, abs=3)
    assert until_s("below", "between") > now_s + 86400
    intermediate = TlsFiles(str(tmp_path / "between.pem"), "", "")
    root.postpone(intermediate, -5, for_s=35)  # what stands between counts, too
    assert until_s("below", "between") == pytest.approx(now_s + 30, abs=3)

    crl = tmp_path / "crl.pem"

    def lists(**about: Any) -> Revocations:
        root.revoke(crl, **about)
        return read_revocations(crl.read_bytes(), trusted, datetime.now(UTC))

    root.revoke(crl, plain)
    revoked = read_revocations(crl.read_bytes(), trusted, datetime.now(UTC))
    assert until_s("plain", revoked=revoked) == -math.inf
    both = [(tmp_path / f"{each}.pem").read_bytes() for each in ("below", "between")]
    assert validity(both, trusted, revoked).until_s > now_s
    root.revoke(crl, intermediate)
    revoked = read_revocations(crl.read_bytes(), trusted, datetime.now(UTC))
    assert until_s("below", "between", revoked=revoked) == -math.inf  # it stands on a revoked one

    stranger = Authority(tmp_path, "stranger")
    stranger.revoke(tmp_path / "theirs.pem", below)
    for contents, why in (
        ((tmp_path / "theirs.pem").read_bytes(), "not signed by an authority"),
        (b"", "no list"),
        (b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "can't be read"),
        (crl.read_bytes()[:-200], "can't be read"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_revocations(contents, trusted, datetime.now(UTC))
    with pytest.raises(ConfigError, match="was to be replaced"):
        lists(for_s=-5)
    with pytest.raises(ConfigError, match="delta"):
        lists(delta=3)
    with pytest.raises(ConfigError, match="not valid yet"):
        root.revoke(crl)
        read_revocations(crl.read_bytes(), trusted, datetime.now(UTC) - timedelta(days=2))
