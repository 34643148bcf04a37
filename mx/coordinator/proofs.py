"""What a coordinator believes of those who register: proofs of the name key, and its own receipts.

A proof is good for one registration: it covers a nonce that `Missing` gave, the source's id, its
endpoint and the digest of its secret. Nonces carry their time and a MAC, so that none is stored
before it is used.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from blake3 import blake3

from mx.core.budget import Budget, Limits
from mx.core.marks import Mark
from mx.core.ownership import MAC_BYTES, Purpose, Receipt, proof, statement
from mx.core.types import Registration
from mx.core.vouching import decode
from mx.errors import ConfigError, NotAllowedError, UnknownSourceError
from mx.lenderkey import check_lender
from mx.publickey import is_signed
from mx.wire.v1 import coordinator_pb2 as pb

#: How long a nonce is good: longer than the upload of a large manifest takes.
NONCE_S = 120.0
_LIFE_BYTES = 16
_HEAD = struct.Struct(">d16s")
_LATEST = struct.Struct(">Q")
#: No receipt begins so: after its life comes JSON.
_MARKS = b"mx mark of how far a state had come, version 1: "
_SEEN = b"mx note of what a reader has seen, version 1: "


class Nonces:
    """The nonces of one life of a coordinator."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: The most that may have been used lately.
        """
        self._key = secrets.token_bytes(32)
        self._budget = Budget(
            most, f"the coordinator has had {{}} registrations within {NONCE_S:g} s"
        )
        #: Until when each would be good, and who used it.
        self._used: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def issue(self, now: float) -> bytes:
        """Return a nonce that is good from now on."""
        head = _HEAD.pack(now, secrets.token_bytes(16))
        return head + blake3(head, key=self._key).digest()

    def use(self, now: float, nonce: bytes, principal: str) -> None:
        """Use up a nonce.

        Args:
            now: The time.
            nonce: The nonce.
            principal: Who uses it.

        Raises:
            UnknownSourceError: It is of another life of the coordinator, or too old.
            NotAllowedError: It was used before.
            CapacityError: Too many were used lately, in all or by the principal.
        """
        while self._used and next(iter(self._used.values()))[0] <= now:
            _, (_, used_by) = self._used.popitem(last=False)
            self._budget.take(used_by, -1)
        head, mac = nonce[: _HEAD.size], nonce[_HEAD.size :]
        if not hmac.compare_digest(blake3(head, key=self._key).digest(), mac):
            raise UnknownSourceError("the coordinator restarted while the source registered")
        issued_s, _ = _HEAD.unpack(head)
        if nonce in self._used:
            raise NotAllowedError("this registration was sent before")
        if not issued_s <= now < issued_s + NONCE_S:
            raise UnknownSourceError(f"the registration took more than {NONCE_S:g} s")
        self._budget.add(principal)
        # By the time of use, so that the first is the first that ends.
        self._used[nonce] = now + NONCE_S, principal


class Proofs:
    """Checks what a source says of itself when it registers, and makes receipts."""

    def __init__(
        self,
        receipt_key: bytes | None,
        now: Callable[[], float],
        epoch: Callable[[], str],
        most_nonces: int = Limits().nonces,
    ) -> None:
        """
        Args:
            receipt_key: 32 bytes that this coordinator keeps over a restart; None: receipts and
                marks end with it.
            now: Returns the time on a clock that never goes back.
            epoch: Returns the epoch of the state: that is the life which receipts are of.
            most_nonces: The most registrations with a proof within `NONCE_S`.
        """
        self._receipt_key = receipt_key or secrets.token_bytes(32)
        self._nonces = Nonces(most_nonces)
        self._now = now
        self._epoch = epoch

    def nonce(self) -> bytes:
        """Return a nonce for one registration."""
        return self._nonces.issue(self._now())

    def check(
        self,
        registration: Registration,
        source: pb.Source,
        principal: str,
        subject: str | None = None,
    ) -> None:
        """Check that a source holds the key of the commitment that it registers with, if any, or a
        lender key that this has certified.

        Args:
            registration: What it asks for.
            source: Its message, which has the proof.
            principal: Who registers it, or from where.
            subject: Whom its certificate names, None without TLS.

        Raises:
            NotAllowedError: It does not, or updates a name without one.
            UnknownSourceError: As `Nonces.use`.
        """
        record, replaces = registration.record, registration.intent.replaces
        if not record.commitment:
            if replaces:
                raise NotAllowedError(
                    f"{record.model.name} can be updated only with its name key",
                    hint="give the source the owner's key file (`name_key`)",
                )
            return
        key = record.model
        purpose = Purpose.REGISTER
        if replaces:
            purpose, key = Purpose.UPDATE, key._replace(revision=replaces)
        said = proof(
            purpose, key, record.ref.identity, record.source_id, record.endpoint,
            blake3(registration.secret).digest(), source.nonce,
        )  # fmt: skip
        vouched = statement(key, record.ref.identity, replaces=replaces)
        public = record.commitment
        if record.certificate:
            public = check_lender(record, subject, updates=bool(replaces))
        if not (
            is_signed(public, source.proof, said) and is_signed(public, record.statement, vouched)
        ):
            raise NotAllowedError(
                f"the source does not hold the key of its commitment for {key.name}"
            )
        self._nonces.use(self._now(), source.nonce, principal)

    def vouched(self, registration: Registration) -> Registration:
        """Return a registration without its vouch, unless that is of its weights, and its
        commitment has signed it."""
        record = registration.record
        key = record.model._replace(revision=registration.intent.replaces or record.model.revision)
        found = decode(record.vouch, key, is_signed)
        known = found is not None and found.identity == record.ref.identity
        return registration if known else replace(registration, record=replace(record, vouch=b""))

    def receipt(self, bound: Receipt | None) -> bytes:
        """Return the receipt of a binding, b"" for none."""
        if bound is None:
            return b""
        data = self._life() + bound.issued(time.time()).encode()
        return self._mac(data) + data

    def _life(self) -> bytes:
        return blake3(self._epoch().encode()).digest(_LIFE_BYTES)

    def read(self, receipt: bytes) -> Receipt | None:
        """Return what a receipt says; None if it is not this coordinator's."""
        mac, data = receipt[:MAC_BYTES], receipt[MAC_BYTES:]
        if not receipt or not hmac.compare_digest(mac, self._mac(data)):
            return None
        return self._decoded(data)

    def _decoded(self, data: bytes) -> Receipt | None:
        life, data = data[:_LIFE_BYTES], data[_LIFE_BYTES:]
        try:
            return Receipt.decode(data)._replace(this_life=life == self._life())
        except ConfigError:
            return None

    def seen(self, bound: Receipt | None, latest: int) -> bytes:
        """Return what a reader brings again to say whose a name was and which updates there were,
        b"" for nothing. It binds no weights.

        Args:
            bound: What there is of the name; None for nothing.
            latest: The number of the state's last entry.
        """
        if bound is None:
            return b""
        data = _LATEST.pack(latest) + self._life() + bound.issued(time.time()).encode()
        return self._mac(_SEEN + data) + data

    def read_seen(self, seen: bytes) -> tuple[Receipt, Mark] | None:
        """Return what a reader has seen, and how far the state had come then; None if that is not
        this coordinator's. The mark of another life has what is kept of its epoch."""
        mac, data = seen[:MAC_BYTES], seen[MAC_BYTES:]
        if not seen or not hmac.compare_digest(mac, self._mac(_SEEN + data)):
            return None
        (latest,), data = _LATEST.unpack_from(data), data[_LATEST.size :]
        found = self._decoded(data)
        if found is None:
            return None
        epoch = self._epoch() if found.this_life else data[:_LIFE_BYTES].hex()
        return found, Mark(epoch, latest)

    def mark(self, mark: Mark) -> bytes:
        """Return a mark as sources are told it."""
        data = mark.encode()
        return self._mac(_MARKS + data) + data

    def is_genuine(self, told: bytes) -> bool:
        """Return True if a coordinator with this key has made a mark."""
        mac, data = told[:MAC_BYTES], _MARKS + told[MAC_BYTES:]
        return hmac.compare_digest(mac, self._mac(data))

    def _mac(self, data: bytes) -> bytes:
        return blake3(data, key=self._receipt_key).digest()
