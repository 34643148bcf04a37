"""Certificates that lead to an authority, or do not any more."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from mx.core.certificates import (
    Certificate,
    Revocations,
    certificates_in,
    validity,
)
from tests.support.certificates import Authority

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
        ("by-member", "member"),  # which is no authority
        ("below", *["other"] * 8, "between"),
        (),
    ):
        assert not is_signed(shown(*chain), trusted)
    assert is_signed(shown("below"), certificates_in(*shown("between")))
    assert not is_signed([b"nothing", *shown("member")], trusted)
