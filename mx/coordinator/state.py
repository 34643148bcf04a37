"""The coordinator's state: the interface that SQLite and Redis will implement too.

The service uses the state through `StateStore` alone. `MemoryState` is its only implementation so
far: the pure machines of `mx.core` with a clock.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mx.core.answers import BundleStatus, Listed, ModelStatus, Resolved
from mx.core.documents import DocumentStore
from mx.core.named import Meant
from mx.core.ownership import Receipt
from mx.core.registration import Registration
from mx.core.registry import Change, ChangeKind, Limits, Registered, Registry
from mx.core.types import ModelKey, SourceRecord, SourceState
from mx.errors import ConfigError, PeerProtocolError
from mx.units import MIB

#: The number of leases for which a source stays listed before its first heartbeat: if a thousand
#: register at once, its heartbeat stream waits for the registrations before it.
_FIRST_LEASES = 3

#: Called with the changes of sources, and with what names have come to mean through them.
Listener = Callable[[Sequence[Change], Sequence[Meant]], None]


class StateStore(Protocol):
    """The state of one coordinator. All methods run on one event loop.

    Methods that are not documented here do and raise what those of `mx.core.registry` do.
    """

    #: Differs after each loss of state: clients that see a new epoch register again.
    epoch: str
    lease_s: float

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every change, in order, on the event loop."""

    async def missing(self, digests: Sequence[bytes], address: str = "") -> list[bytes]:
        """Return the documents that are not held; the others stay for a while, and `address` pays
        for those that nothing else holds."""

    def document(self, digest: bytes) -> bytes | None:
        """Return a held document, or None. Not a coroutine, since it is called for each page."""

    async def reserve(self, nbytes: int, address: str = "") -> None:
        """Reserve space for documents that are being uploaded from an address.

        Raises:
            CapacityError: The documents would exceed the limit, or that of the address.
        """

    async def unreserve(self, nbytes: int, address: str = "") -> None:
        """Return space that `reserve` reserved."""

    async def register(
        self,
        registration: Registration,
        documents: Mapping[bytes, bytes],
        *,
        receipt: Receipt | None = None,
        address: str = "",
    ) -> Registered:
        """List a source, as `Registry.register`, and store the documents of its manifest, which
        the caller has decoded.

        Raises:
            PeerProtocolError: A document of the manifest is neither given nor held, or has another
                size.
            MxError: As `Registry.register`.
        """

    async def heartbeat(
        self,
        source_id: str,
        secret: bytes,
        state: SourceState,
        readers: int,
        gb_per_s: float,
        requests_port: int,
    ) -> SourceRecord: ...

    async def advertise(
        self, source_id: str, secret: bytes, generation: int, held: Sequence[tuple[int, int]]
    ) -> None: ...

    async def deregister(
        self, source_id: str, secret: bytes, *, keeps_name: bool = False
    ) -> None: ...

    async def layout_version(self, key: ModelKey, unlisted: int) -> int:
        """See `mx.core.registry.Registry.layout_version`."""

    async def source(self, source_id: str) -> Listed: ...

    async def sources(self, name: str = "") -> list[Listed]: ...

    async def models(self) -> list[ModelStatus]: ...

    async def bundles(self, name: str = "") -> list[BundleStatus]: ...

    async def resolve(self, name: str, revision: str, variant: str) -> Resolved: ...

    async def tick(self) -> None:
        """Let time pass. Call this a few times per lease."""

    def now(self) -> float:
        """Return the time in seconds, on the clock of `Listed.lease_until_s`."""

    async def close(self) -> None:
        """Release everything."""


class MemoryState:
    """State in memory, which ends with the process."""

    def __init__(
        self,
        *,
        lease_s: float = 5.0,
        grace_s: float = 60.0,
        limits: Limits | None = None,
        document_limit_bytes: int = 512 * MIB,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.lease_s = lease_s
        self.now = time.monotonic
        self._registry = Registry(
            lease_s=lease_s,
            first_lease_s=_FIRST_LEASES * lease_s,
            binding_grace_s=grace_s,
            limits=limits,
        )
        self._store = DocumentStore(limit_bytes=document_limit_bytes, grace_s=grace_s)
        self._listeners: list[Listener] = []
        #: By source, the address that pays for its documents: the one that it first came from.
        self._payers: dict[str, str] = {}

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    async def missing(self, digests: Sequence[bytes], address: str = "") -> list[bytes]:
        now = self.now()
        return [digest for digest in digests if not self._store.keep(now, digest, address)]

    def document(self, digest: bytes) -> bytes | None:
        return self._store.get(digest)

    async def reserve(self, nbytes: int, address: str = "") -> None:
        self._store.reserve(nbytes, address)

    async def unreserve(self, nbytes: int, address: str = "") -> None:
        self._store.unreserve(nbytes, address)

    async def register(
        self,
        registration: Registration,
        documents: Mapping[bytes, bytes],
        *,
        receipt: Receipt | None = None,
        address: str = "",
    ) -> Registered:
        now = self.now()
        for digest, nbytes in registration.record.documents:
            data = documents.get(digest) or self._store.get(digest)
            if data is None:
                raise PeerProtocolError(
                    f"document {digest[:8].hex()} of the manifest was not sent",
                    hint="call Missing, and send the documents that it names",
                )
            if len(data) != nbytes:
                raise PeerProtocolError(f"document {digest[:8].hex()} has {len(data)} bytes")
        fresh = [d for d in documents if self._store.get(d) is None]
        listed: Registered | None = None
        try:
            for digest in fresh:
                self._store.put(now, digest, documents[digest], address)
            listed = self._registry.register(now, registration, receipt=receipt, address=address)
            return listed
        finally:
            self._publish()
            if listed is None:
                self._store.discard(fresh)

    async def heartbeat(
        self,
        source_id: str,
        secret: bytes,
        state: SourceState,
        readers: int,
        gb_per_s: float,
        requests_port: int,
    ) -> SourceRecord:
        try:
            return self._registry.heartbeat(
                self.now(),
                source_id,
                secret,
                state,
                readers=readers,
                gb_per_s=gb_per_s,
                requests_port=requests_port,
            )
        finally:
            self._publish()

    async def advertise(
        self, source_id: str, secret: bytes, generation: int, held: Sequence[tuple[int, int]]
    ) -> None:
        try:
            self._registry.advertise(self.now(), source_id, secret, generation, held)
        finally:
            self._publish()

    async def deregister(self, source_id: str, secret: bytes, *, keeps_name: bool = False) -> None:
        try:
            self._registry.deregister(self.now(), source_id, secret, keeps_name=keeps_name)
        finally:
            self._publish()

    async def layout_version(self, key: ModelKey, unlisted: int) -> int:
        await self.tick()
        return self._registry.layout_version(key, unlisted)

    async def source(self, source_id: str) -> Listed:
        await self.tick()
        return self._registry.source(source_id)

    async def sources(self, name: str = "") -> list[Listed]:
        await self.tick()
        return self._registry.sources(name)

    async def models(self) -> list[ModelStatus]:
        await self.tick()
        return self._registry.models()

    async def bundles(self, name: str = "") -> list[BundleStatus]:
        await self.tick()
        return self._registry.bundles(name)

    async def resolve(self, name: str, revision: str, variant: str) -> Resolved:
        await self.tick()
        return self._registry.resolve(name, revision, variant)

    async def tick(self) -> None:
        now = self.now()
        self._registry.tick(now)
        self._publish()
        self._store.sweep(now)

    async def close(self) -> None:
        self._listeners.clear()

    def _publish(self) -> None:
        """Report the changes. Documents are held for what is bound, and for each listed source,
        whose files may differ. What comes is held before what goes is released."""
        changes, now = self._registry.take_changes(), self.now()
        meant = self._registry.take_meant()
        named = [(ref.documents, held, "") for ref, held in self._registry.take_refs()]
        for change in changes:
            source_id = change.record.source_id
            if change.kind is ChangeKind.UP:
                self._payers[source_id] = self._registry.source(source_id).address
            payer = self._payers[source_id]
            if change.kind is not ChangeKind.GONE:
                named.append((change.record.documents, True, payer))
            else:
                del self._payers[source_id]
            if change.before is not None:
                named.append((change.before.documents, False, payer))
        for documents, held, payer in sorted(named, key=lambda each: not each[1]):  # see above
            digests = [digest for digest, _ in documents]
            if held:
                self._store.hold(digests, payer)
            else:
                self._store.release(now, digests, payer)
        if changes or meant:
            for listener in self._listeners:
                listener(changes, meant)


def open_state(spec: str, *, lease_s: float = 5.0) -> StateStore:
    """Return the state store that `--state` names.

    Args:
        spec: "memory".
        lease_s: How long a source stays listed after a heartbeat.

    Raises:
        ConfigError: It is another kind, the planned ones included.
    """
    if spec == "memory":
        return MemoryState(lease_s=lease_s)
    kind = spec.partition(":")[0]
    if kind in ("sqlite", "redis", "rediss"):
        raise ConfigError(f"`state={kind}` is not in this version", hint="use `state=memory`")
    raise ConfigError(f"`state={spec}` is not a kind of state", hint="use `state=memory`")
