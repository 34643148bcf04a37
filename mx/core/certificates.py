"""Until when certificates lead to an authority that is trusted: connections outlive changes of the
authority's file, of lists of revoked ones, and their own certificates. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509 import BasicConstraints, Certificate, DuplicateExtension, ExtensionNotFound

from mx.errors import ConfigError

_BEGIN = b"-----BEGIN CERTIFICATE-----"
_BEGIN_LIST = b"-----BEGIN X509 CRL-----"
#: The most certificates between that of a process and an authority that are looked at.
_MOST_BETWEEN = 8


@dataclass(frozen=True, slots=True)
class Revocations:
    """Revoked certificates, by the issuer's name and the serial number, and until when the lists
    that name them say that there are no others, in Unix time."""

    serials: frozenset[tuple[bytes, int]] = frozenset()
    until_s: float = math.inf

    def have(self, certificate: Certificate) -> bool:
        """Return True if a certificate is revoked."""
        serial = certificate.serial_number
        return bool(self.serials) and (certificate.issuer.public_bytes(), serial) in self.serials


@dataclass(frozen=True, slots=True)
class Validity:
    """Until when a certificate is valid, in Unix time: -inf if it leads to no authority, or is
    revoked."""

    until_s: float = -math.inf
    revoked: bool = False


def certificates_in(pem: bytes) -> frozenset[Certificate]:
    """Return the certificates of a PEM file, without those that can't be read."""
    return frozenset(_readable(_BEGIN + each for each in pem.split(_BEGIN)[1:]))


def validity(shown: Sequence[bytes], by: frozenset[Certificate], revoked: Revocations) -> Validity:
    """Return until when a certificate is one of some authorities', or leads to one.

    It was verified when its connection began, against the authorities of then. So only the way from
    it to an authority is looked for here, not purposes and names: the way that lasts longest.

    Args:
        shown: What the other end has shown, PEM or DER: its certificate, then those between.
        by: The authorities.
        revoked: The revoked certificates.
    """
    between, best, hit = _readable(shown[1 : 1 + _MOST_BETWEEN]), -math.inf, False
    reached = [(one, math.inf) for one in _readable(shown[:1])]
    while reached:
        one, until_s = reached.pop()
        if revoked.have(one):
            hit = True
            continue
        until_s = min(until_s, one.not_valid_after_utc.timestamp())
        for each in by:
            if one == each or _has_signed(each, one):
                best = max(best, min(until_s, each.not_valid_after_utc.timestamp()))
        above = [each for each in between if _may_sign(each) and _has_signed(each, one)]
        between = [each for each in between if each not in above]
        reached += [(each, until_s) for each in above]
    return Validity(best, revoked=hit and best == -math.inf)


def read_revocations(pem: bytes, by: frozenset[Certificate], now: datetime) -> Revocations:
    """Return what the lists of a PEM file revoke.

    Args:
        pem: The file, of one list or more.
        by: The authorities, of which one has signed each.
        now: The time.

    Raises:
        ConfigError: There is none, or one can't be read, is of no authority, is not valid now, or
            names only some of the revoked certificates.
    """
    serials, until_s, parts = set(), math.inf, pem.split(_BEGIN_LIST)[1:]
    if not parts:
        raise ConfigError("it has no list of revoked certificates in PEM form")
    for part in parts:
        try:
            found = x509.load_pem_x509_crl(_BEGIN_LIST + part)
            issuer = found.issuer.public_bytes()
            kinds = {type(each.value) for each in found.extensions}
            serials |= {(issuer, each.serial_number) for each in found}
        except ValueError as error:
            raise ConfigError(f"a list in it can't be read: {error}") from None
        name = found.issuer.rfc4514_string()[:200]
        if {x509.DeltaCRLIndicator, x509.IssuingDistributionPoint} & kinds:
            raise ConfigError(f"the list of {name} is a delta, or of some certificates only")
        if not any(_is_list_of(found, each) for each in by):
            raise ConfigError(f"the list of {name} is not signed by an authority of `tls_ca`")
        if found.last_update_utc > now:
            raise ConfigError(f"the list of {name} is not valid yet: check the clock")
        if (next_update := found.next_update_utc) is not None:
            until_s = min(until_s, next_update.timestamp())
            if next_update <= now:
                raise ConfigError(f"the list of {name} was to be replaced by {next_update:%F %T}")
    return Revocations(frozenset(serials), until_s)


def _is_list_of(found: x509.CertificateRevocationList, authority: Certificate) -> bool:
    key = authority.public_key()
    try:
        return found.issuer == authority.subject and found.is_signature_valid(key)  # type: ignore[arg-type]
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False


def _readable(each_shown: Iterable[bytes]) -> list[Certificate]:
    found: list[Certificate] = []
    for shown in each_shown:
        try:
            if shown.lstrip().startswith(b"-----"):
                found += x509.load_pem_x509_certificates(shown)
            else:
                found.append(x509.load_der_x509_certificate(shown))
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
