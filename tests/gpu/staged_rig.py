"""tcp into GPU memory by way of `mx.cuda.staged`, as a transport that the suite can run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mx.core.topology import Place
from mx.cuda import driver as cuda
from mx.cuda.device import Device
from mx.cuda.staged import GrowingStagedSession
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Path,
    Session,
    Unavailable,
    Viable,
)
from mx.units import KIB
from mx_transports.tcp import TcpTransport


class _OwnDevice(GrowingStagedSession):
    """Closes its device when nothing of it is left."""

    def join(self, timeout_s: float | None = None) -> bool:
        joined = super().join(timeout_s)
        if joined:
            self._device.close()
        return joined


class StagedTcp:
    """A host transport whose sessions read into GPU memory."""

    name = "tcp"  # paths are tcp's

    def __init__(self) -> None:
        self._tcp = TcpTransport()

    def probe(self) -> Viable | Unavailable:
        return self._tcp.probe()

    def reach(self, here: Place, there: Place) -> Path | None:
        return self._tcp.reach(here, there)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return self._tcp.expose(regions, options)

    def open(self, grant: Grant) -> Session:
        with contextlib.ExitStack() as undo:
            device = undo.enter_context(Device.open(cuda.load(), "cuda:0"))
            inner = self._tcp.open(grant)
            undo.callback(inner.join)
            undo.callback(inner.close)
            session = _OwnDevice(inner, device, slot_nbytes=256 * KIB, slots=4)
            undo.pop_all()
            return session
