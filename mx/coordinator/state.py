"""Where the coordinator's state lives: the seam behind which SQLite and Redis will stand.

The service does its work through `StateStore` alone. `MemoryState` is the one there is: the pure
machines of `mx.core` with a clock.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mx.core.documents import DocumentStore
from mx.core.registry import (
    Change,
    ChangeKind,
    Limits,
    Listed,
    ModelSummary,
    Registry,
    Resolved,
)
from mx.core.types import SourceRecord, SourceState
from mx.errors import ConfigError, MxError, PeerProtocolError
from mx.units import MIB

#: Before its first heartbeat a source stays listed for so many leases: when a thousand register at
#: once, its heartbeat stream waits until the registrations before it have been heard.
_FIRST_LEASES = 3

Listener = Callable[[Sequence[Change]], None]


class StateStore(Protocol):
    """All methods belong to one event loop. They raise as `mx.core.registry` says."""

    #: Differs after each loss of state: clients that see another one register again.
    epoch: str
    lease_s: float

    def subscribe(self, listener: Listener) -> None:
        """`listener` hears of every change, in order, in the event loop."""

    async def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those documents that are not held; the others stay for a while."""

    def document(self, digest: bytes) -> bytes | None:
        """A held document; without waiting, since it is asked for page by page."""

    async def reserve(self, nbytes: int) -> None:
        """Room for documents on their way; CapacityError if there is none."""

    async def unreserve(self, nbytes: int) -> None: ...

    async def register(
        self,
        record: SourceRecord,
        documents: Mapping[bytes, bytes],
        secret: bytes,
        *,
        replaces_revision: bool,
        row_count: int,
        address: str = "",
    ) -> SourceRecord:
        """`address` is where the registration came from. Raises PeerProtocolError where a
        document of the manifest is neither given nor held."""

    async def heartbeat(
        self, source_id: str, secret: bytes, state: SourceState, readers: int, gb_per_s: float
    ) -> None: ...

    async def advertise(
        self, source_id: str, secret: bytes, generation: int, held: Sequence[tuple[int, int]]
    ) -> None: ...

    async def deregister(self, source_id: str, secret: bytes) -> None: ...

    async def source(self, source_id: str) -> Listed: ...

    async def sources(self, name: str = "") -> list[Listed]: ...

    async def models(self) -> list[ModelSummary]: ...

    async def resolve(self, name: str, revision: str, variant: str) -> Resolved: ...

    async def tick(self) -> None:
        """Let time pass; to be called a few times per lease."""

    def now(self) -> float:
        """The clock that `Listed.lease_until_s` is on, in seconds."""

    async def close(self) -> None: ...


class MemoryState:
    """State that ends with the process."""

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
        self._peers = Registry(
            lease_s=lease_s,
            first_lease_s=_FIRST_LEASES * lease_s,
            binding_grace_s=grace_s,
            limits=limits,
        )
        self._store = DocumentStore(limit_bytes=document_limit_bytes, grace_s=grace_s)
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    async def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        now = self.now()
        return [digest for digest in digests if not self._store.keep(now, digest)]

    def document(self, digest: bytes) -> bytes | None:
        return self._store.get(digest)

    async def reserve(self, nbytes: int) -> None:
        self._store.reserve(nbytes)

    async def unreserve(self, nbytes: int) -> None:
        self._store.unreserve(nbytes)

    async def register(
        self,
        record: SourceRecord,
        documents: Mapping[bytes, bytes],
        secret: bytes,
        *,
        replaces_revision: bool,
        row_count: int,
        address: str = "",
    ) -> SourceRecord:
        now = self.now()
        for digest, nbytes in zip(record.ref.digests, record.ref.sizes, strict=True):
            data = documents.get(digest) or self._store.get(digest)
            if data is None:
                raise PeerProtocolError(
                    f"document {digest[:8].hex()} of the manifest did not come",
                    hint="ask Missing, and send what it names",
                )
            if len(data) != nbytes:
                raise PeerProtocolError(f"document {digest[:8].hex()} has {len(data)} bytes")
        fresh = [d for d in documents if self._store.get(d) is None]
        try:
            for digest in fresh:
                self._store.put(now, digest, documents[digest])
            return self._peers.register(
                now,
                record,
                secret,
                replaces_revision=replaces_revision,
                row_count=row_count,
                address=address,
            )
        except MxError:
            self._store.discard(fresh)
            raise
        finally:
            self._publish()

    async def heartbeat(
        self, source_id: str, secret: bytes, state: SourceState, readers: int, gb_per_s: float
    ) -> None:
        try:
            self._peers.heartbeat(
                self.now(), source_id, secret, state, readers=readers, gb_per_s=gb_per_s
            )
        finally:
            self._publish()

    async def advertise(
        self, source_id: str, secret: bytes, generation: int, held: Sequence[tuple[int, int]]
    ) -> None:
        try:
            self._peers.advertise(self.now(), source_id, secret, generation, held)
        finally:
            self._publish()

    async def deregister(self, source_id: str, secret: bytes) -> None:
        try:
            self._peers.deregister(self.now(), source_id, secret)
        finally:
            self._publish()

    async def source(self, source_id: str) -> Listed:
        await self.tick()
        return self._peers.source(source_id)

    async def sources(self, name: str = "") -> list[Listed]:
        await self.tick()
        return self._peers.sources(name)

    async def models(self) -> list[ModelSummary]:
        await self.tick()
        return self._peers.models()

    async def resolve(self, name: str, revision: str, variant: str) -> Resolved:
        await self.tick()
        return self._peers.resolve(name, revision, variant)

    async def tick(self) -> None:
        now = self.now()
        self._peers.tick(now)
        self._publish()
        self._store.sweep(now)

    async def close(self) -> None:
        self._listeners.clear()

    def _publish(self) -> None:
        changes = self._peers.take_changes()
        if not changes:
            return
        now = self.now()
        for change in changes:
            if change.kind is not ChangeKind.GONE:
                self._store.hold(change.record.ref.digests)
            if change.before is not None:
                self._store.release(now, change.before.ref.digests)
        for listener in self._listeners:
            listener(changes)


def open_state(spec: str, *, lease_s: float = 5.0) -> StateStore:
    """`--state`: "memory". Raises ConfigError for others, those that are planned included."""
    if spec == "memory":
        return MemoryState(lease_s=lease_s)
    kind = spec.partition(":")[0]
    if kind in ("sqlite", "redis", "rediss"):
        raise ConfigError(f"`state={kind}`: is not in this version", hint="use `state=memory`")
    raise ConfigError(f"`state={spec}`: no such kind of state", hint="use `state=memory`")
