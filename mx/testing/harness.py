"""What the suite knows of a transport under test: how it is made, its limits, its sources.

A third party subclasses `Harness` where the defaults do not fit.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mx.config import Settings
from mx.core.topology import Place
from mx.testing.child import ChildSource, load_transport
from mx.testing.faultproxy import FaultProxy
from mx.testing.holdings import HeldResources
from mx.testing.memory import Kind
from mx.transport import Rail, Session, TlsFiles, Transport
from mx.units import MIB

PEER = "localhost:7601"
GENERATION = 1

HERE = Place(boot_id="boot-1", hostname="a", uid=1000, pid=100, addresses=("127.0.0.1",))


class RemoteSource(Protocol):
    """A source that can be killed or stopped, as a process can."""

    @property
    def ticket(self) -> bytes: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Harness:
    """How a rule makes the transport under test. Subclass it where the defaults do not fit.

    `target` is "module:callable" without arguments, importable in a child process too.
    `big_nbytes` must be more than the transport and the kernel buffer between the two sides.
    `deadline_s` is how long a rule waits for what must happen; nothing is timed against it.
    """

    target: str
    kind: Kind = Kind.SEALED
    big_nbytes: int = 48 * MIB
    stall_timeout_s: float = 2.0
    deadline_s: float = 15.0
    tls: TlsFiles | None = None
    #: The reader's place and the source's: what paths are between, and where memory is made.
    here: Place = HERE
    there: Place = HERE
    #: The values of settings that transports ask for, as JSON has them; others have their defaults.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, name: str) -> Any:
        return Settings(added=self.settings).value(name)

    def transport(self) -> Transport:
        return load_transport(self.target)

    def remote(self, transport: Transport, sizes: Sequence[int], seed: int) -> RemoteSource:
        """Start a source in another process, with memory as `Memory(size, seed + index)`."""
        return ChildSource(
            self.target,
            sizes,
            seed=seed,
            kind=self.kind,
            generation=GENERATION,
            stall_timeout_s=self.stall_timeout_s,
            device=self.there.device,
            settings=self.settings,
        )

    def uses(self, rail: Rail, session: Session) -> bool:
        """Return True if a session's data goes between the two addresses of a rail. Override where
        it does not go over sockets of this process."""
        return (rail.local_address, rail.remote_address) in set(_connections())

    def network_host(self) -> str:
        """Return an address of this machine beyond loopback, "" if it has none."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing
            except OSError:
                return ""
            return str(probe.getsockname()[0])

    @contextlib.contextmanager
    def tapped(self, ticket: bytes) -> Iterator[tuple[bytes, bytearray]]:
        """Look at what goes over the network. Override where tickets are not JSON with `addresses`,
        pairs of host and port, or data goes by another way than to these by TCP.

        Yields:
            The same ticket with the address of a relay, and the bytes that go over that towards the
            reader, as they come.
        """
        document = json.loads(ticket)
        host, port = document["addresses"][0]
        with FaultProxy((host or "127.0.0.1", port)) as relay:
            relay.down.kept = kept = bytearray()
            document["addresses"] = [list(relay.address)]
            yield json.dumps(document).encode(), kept

    def tamper(self, ticket: bytes) -> bytes:
        """Return the same ticket with another secret. Override where tickets are not JSON."""
        document = json.loads(ticket)
        secret = document["secret"]
        document["secret"] = ("1" if secret[0] == "0" else "0") + secret[1:]
        return json.dumps(document).encode()


def _connections() -> Iterator[tuple[str, str]]:
    """(local, remote) IPv4 addresses of this process's connected sockets."""
    ours = {target for _, target in HeldResources.now().descriptors}
    for table in ("tcp", "udp"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in ours:
                ends = [bytes.fromhex(end.partition(":")[0])[::-1] for end in fields[1:3]]
                yield socket.inet_ntoa(ends[0]), socket.inet_ntoa(ends[1])
