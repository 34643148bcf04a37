"""Whether a connection's certificate is still of an authority that is trusted: connections outlive
a change of the authority's file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509 import BasicConstraints, Certificate, DuplicateExtension, ExtensionNotFound

_BEGIN = b"-----BEGIN CERTIFICATE-----"
#: The most certificates between that of a process and an authority that are looked at.
_MOST_BETWEEN = 8


def certificates_in(pem: bytes) -> frozenset[Certificate]:
    """Return the certificates of a PEM file, without those that can't be read."""
    return frozenset(_readable(_BEGIN + each for each in pem.split(_BEGIN)[1:]))


def is_signed(shown: Sequence[bytes], by: frozenset[Certificate]) -> bool:
    """Return True if a certificate is one of some authorities', or leads to one.

    It was verified when its connection began, against the authorities of then. So only the way from
    it to an authority is looked for here, not purposes, names and times.

    Args:
        shown: What the other end has shown: its certificate, and then those between.
        by: The authorities.
    """
    reached, between = _readable(shown[:1]), _readable(shown[1 : 1 + _MOST_BETWEEN])
    while reached:
        one = reached.pop()
        if one in by or any(_has_signed(each, one) for each in by):
            return True
        above = [each for each in between if _may_sign(each) and _has_signed(each, one)]
        between = [each for each in between if each not in above]
        reached += above
    return False


def _readable(pems: Iterable[bytes]) -> list[Certificate]:
    found: list[Certificate] = []
    for pem in pems:
        try:
            found += x509.load_pem_x509_certificates(pem)
        except ValueError:
            continue
    return found


def _may_sign(certificate: Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(BasicConstraints).value.ca
    except (ExtensionNotFound, DuplicateExtension, ValueError):
        return False


def _has_signed(authority: Certificate, certificate: Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True
