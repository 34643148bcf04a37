"""The transport `parts`: reads a trainer's model from all of its ranks.

The first rank serves the whole model, of which it has a part: its tickets say where the parts are.
A reader opens a session to each of them, by the transports that lead there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

from mx import runtime
from mx.core.layout import plan_layout
from mx.core.topology import Fact, Place
from mx.errors import (
    ClosedError,
    ManifestError,
    MxError,
    PeerProtocolError,
    PeerTimeoutError,
    UnsuitedError,
)
from mx.fetching.options import PullOptions
from mx.fetching.reads import Connection
from mx.plugins import TransportContext
from mx.trainers.pieces import forms_of, spans_of
from mx.trainers.reading import PartsReader, PartsTicket
from mx.trainers.session import Join, PartsMap, PartsSession
from mx.trainers.whole import specs_of
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Medium,
    Path,
    Session,
    TlsFiles,
    Unavailable,
    Viable,
)

NAME = "parts"
#: What the place of a process says that serves a whole model.
FACT = Fact(NAME, "01")
#: What is expected of it before it is measured.
_LOCAL_GB_PER_S, _NETWORK_GB_PER_S = 2.0, 1.25


class PartsTransport:
    """See `mx.transport.Transport`. It exposes nothing by itself: `ExposingParts` does."""

    name = NAME

    def probe(self) -> Viable | Unavailable:
        return Viable("the ranks of a trainer, each by another transport")

    def reach(self, here: Place, there: Place) -> Path | None:
        if not (here.device == there.device == "cpu" and (here.fact(NAME) or there.fact(NAME))):
            return None
        ours, theirs = ((each.boot_id, each.net_namespace) for each in (here, there))
        same = bool(here.boot_id) and ours == theirs
        medium = Medium.MEMORY if same else Medium.NETWORK
        rate = _LOCAL_GB_PER_S if same else _NETWORK_GB_PER_S
        return Path(NAME, rate, detail="from all ranks of a trainer", medium=medium)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Raise UnsuitedError."""
        raise UnsuitedError("only the first rank of a trainer serves its parts")

    def open(self, grant: Grant) -> Session:
        try:
            ticket = PartsTicket.decode(grant.ticket)
        except ValueError as error:
            raise PeerProtocolError(
                f"{grant.peer} sent a ticket that is none: {error}", peer=grant.peer
            ) from None
        opening = runtime.submit(lambda: _opened(grant, ticket))
        # What came just now is taken, since it would be closed by none.
        if not futures.wait([opening], 2 * grant.stall_timeout_s).done and opening.cancel():
            raise PeerTimeoutError(
                f"not all parts of the model at {grant.peer} answer", peer=grant.peer
            )
        where, connections, reader = opening.result()
        closing: list[futures.Future[None]] = []

        def close() -> Join:
            with contextlib.suppress(MxError, RuntimeError):  # the loop has ended
                closing.append(runtime.submit(reader.close))
            return lambda timeout_s: not futures.wait(closing, timeout_s).not_done

        return PartsSession(where, connections, close)


def _control_tls(setting: Callable[[str], Any]) -> TlsFiles | None:
    files = [setting(name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_crl")]
    return TlsFiles(*files) if files[0] else None


async def _opened(
    grant: Grant, ticket: PartsTicket
) -> tuple[PartsMap, list[Connection], PartsReader]:
    """Connect to the parts that a ticket names. Raises MxError."""
    from mx.api.common import transports

    setting = grant.setting
    options = PullOptions(
        ticket.parts[0].name,
        tls=_control_tls(setting),
        insecure=setting("insecure"),
        connect_timeout_s=setting("connect_timeout_s"),
        data_tls=grant.tls,
        streams=grant.streams,
        stall_timeout_s=grant.stall_timeout_s,
        trusted_fabric=grant.trusted_fabric,
        transport_context=TransportContext(setting),
    )
    others = {name: each for name, each in transports().items() if name != NAME}
    place = replace(grant.place, device="cpu")
    reader = PartsReader(options, lambda: place, others)
    try:
        parts = await reader.describe(ticket.parts)
        tensors, ties = forms_of([each.document for each in parts])
        layout = plan_layout(*specs_of(tensors, ties), ticket.layout_version)
        if layout.arena_nbytes != grant.region_nbytes[0]:
            raise ManifestError(f"the parts at {grant.peer} are of another model")
        sizes = {name: form.nbytes for name, form in tensors.items()}
        spans = spans_of(sizes, [each.pieces for each in parts])
        where = PartsMap(layout, spans, [each.manifest.layout for each in parts])
        return where, await reader.open(), reader
    except BaseException:
        await runtime.uncut(reader.close())
        raise


class ExposingParts(PartsTransport):
    """The same, of a process that serves the whole model."""

    def __init__(self, ticket: Callable[[], PartsTicket]) -> None:
        """
        Args:
            ticket: Returns where the parts are now.
        """
        self._ticket = ticket

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return _PartsExposure(self._ticket().encode())


class _PartsExposure:
    """Tickets of one version. Which readers have them does not matter: each part grants its own."""

    def __init__(self, ticket: bytes) -> None:
        self._ticket: bytes | None = ticket

    def grant(self, grant_id: str) -> bytes:
        if self._ticket is None:
            raise ClosedError("the exposure is closed")
        return self._ticket

    def revoke(self, grant_id: str) -> None:
        pass

    def set_generation(self, generation: int) -> None:
        pass

    def active_readers(self) -> int:
        return 0

    def close(self) -> None:
        self._ticket = None

    def join(self, timeout_s: float | None = None) -> bool:
        return self._ticket is None
