"""Transports by entry point, each imported when it is first needed.

Installed, each is named in its distribution's metadata under `mx.transports`. From a plain
checkout there is no metadata, and the built-in ones are found by name. One that can't be
imported is still listed, as a transport that is unavailable and says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mx import config, forks, packs
from mx.core.topology import Fact, Place
from mx.errors import LocalError
from mx.packs import LOAD_FAILURES, targets
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Path,
    Preparing,
    Session,
    Transport,
    Unavailable,
    Viable,
)

GROUP = "mx.transports"
#: Also what the distribution's own metadata says; "module:callable".
BUILT_IN = {
    "shm": "mx_transports.shm:ShmTransport",
    "tcp": "mx_transports.tcp:TcpTransport",
    "ucx": "mx_transports.ucx:UcxTransport",
    "cuda_ipc": "mx_transports.cuda_ipc:CudaIpcTransport",
    "pcie_p2p": "mx_transports.pcie_p2p:PciePeerTransport",
    "parts": "mx.trainers.transport:PartsTransport",
}


class BrokenTransport:
    """Stands for a plug-in that could not be loaded: never viable, reaches nothing."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def probe(self) -> Viable | Unavailable:
        return Unavailable(self._reason)

    def reach(self, here: Place, there: Place) -> Path | None:
        return None

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Raises LocalError."""
        raise LocalError(f"transport {self.name}: {self._reason}")

    def open(self, grant: Grant) -> Session:
        """Raises LocalError."""
        raise LocalError(f"transport {self.name}: {self._reason}")


class LazyTransport:
    """A transport of which only the name is known until it is asked something.

    Its module is imported by the first call of a method, on whatever thread that is, and it is made
    once. Where that fails it answers as a BrokenTransport.

    Args:
        name: What it is listed as.
        load: Imports the module, and returns a callable that makes the transport.
    """

    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name = name
        self._load = load
        self._lock = threading.Lock()
        self._made: Transport | None = None

    def loaded(self) -> Transport:
        """Return the transport itself, imported now if it was not before."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = _make(self.name, self._load)
        return self._made

    def prepare(self) -> None:
        """Have the transport load what `open` needs, if it is `Preparing`."""
        with forks.no_fork:  # it imports modules, and loads libraries
            made = self.loaded()
            if isinstance(made, Preparing):
                made.prepare()

    def probe(self) -> Viable | Unavailable:
        return self.loaded().probe()

    def reach(self, here: Place, there: Place) -> Path | None:
        return self.loaded().reach(here, there)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return self.loaded().expose(regions, options)

    def open(self, grant: Grant) -> Session:
        return self.loaded().open(grant)


def transports() -> dict[str, Transport]:
    """Return every transport by name, built-in ones first, without importing any.

    Each call makes new ones; a process keeps what it got. A built-in name can't be taken over
    by another distribution.
    """
    found: dict[str, Transport] = {}
    for name, load in targets(GROUP, BUILT_IN):
        if name not in found:
            found[name] = LazyTransport(name, load)
    return found


def names() -> list[str]:
    """Return the names of all transports, built-in ones first, without importing any."""
    return list(dict.fromkeys(name for name, _ in targets(GROUP, BUILT_IN)))


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What transports get of a pull's or a source's settings, and add to its place.

    `setting` returns the value of a setting by its name. `facts` are for the `Place`. `broken` has
    a stand-in, which says why, for each transport whose facts could not be obtained.
    """

    setting: Callable[[str], Any] = field(default=config.Settings().value, repr=False)
    facts: tuple[Fact, ...] = ()
    broken: Mapping[str, Transport] = field(default_factory=dict)


NO_CONTEXT = TransportContext()
#: What transports of mx ask for.
_ASKED = {"connect_timeout_s", "gpudirect", "insecure", "tls_ca", "tls_cert", "tls_crl", "tls_key"}


def transport_context(settings: config.Settings) -> TransportContext:
    """Return what transports get of these settings, and what those of other distributions say of
    this process. One that fails to say it is not used, and says why."""
    others = dict(targets(GROUP, {})).keys() - BUILT_IN.keys()
    if not others:  # those of mx have no facts, and few settings
        return TransportContext(settings.value) if _ASKED & settings.origins.keys() else NO_CONTEXT
    facts: tuple[Fact, ...] = ()
    broken: dict[str, Transport] = {}
    for pack in packs.packs().values():
        for name in sorted(others.intersection(pack.facts)):
            others.remove(name)
            try:
                said = memoryview(packs.load(pack.facts[name])(settings.value)).hex()
                facts = Place(facts=(*facts, Fact(name, said))).facts
            except Exception as error:  # noqa: BLE001 - another's code: only it is left out
                why = f"its facts: {type(error).__name__}: {error}"
                broken[name] = BrokenTransport(name, why)
    return TransportContext(settings.value, facts, broken)


def _make(name: str, load: Callable[[], object]) -> Transport:
    try:
        factory = load()
        made = factory() if callable(factory) else None
    except LOAD_FAILURES as error:
        return BrokenTransport(name, f"{type(error).__name__}: {error}")
    if not isinstance(made, Transport):
        return BrokenTransport(name, "its entry point does not make an mx.transport.Transport")
    return made
