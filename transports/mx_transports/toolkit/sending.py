"""An exposure that sends the bytes of a read itself, over the reader's connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mx.errors import LocalError
from mx.transport import ExposedRegion, ExposeOptions, ScatteredView, View, host_view, spans_of
from mx_transports.toolkit import limiting
from mx_transports.toolkit.exposure import GrantState, SocketExposure
from mx_transports.toolkit.listeners import Listen, listen
from mx_transports.toolkit.stream import SocketStream


class SendingExposure(SocketExposure):
    """An exposure that sends the bytes itself. See `mx.transport.Sending`.

    Args:
        regions: What is exposed; all of it is in the host's memory.
        options: How to listen, and the limiter that `send` keeps to.
        name: What its threads are called.
        magic: The transport and its version, MAGIC_BYTES long.
        listen: The way to listen, which is called with the options.

    Raises:
        LocalError: A region is on a device, or this process can't listen.
        ConfigError: A TLS file can't be used.
    """

    def __init__(
        self,
        regions: Sequence[ExposedRegion],
        options: ExposeOptions,
        *,
        name: str,
        magic: bytes,
        listen: Listen = listen,
    ) -> None:
        self._views = {region.index: _in_host(region.view) for region in regions}
        super().__init__(name=name, magic=magic, options=options, listen=listen)
        self._limiter = options.limiter
        self._sent_bytes = 0

    def sent_bytes(self) -> int:
        return self._sent_bytes

    def sent_to(self, grant_id: str) -> int:
        with self.lock:
            standing = self.grants.values()
            return sum(each.sent_nbytes for each in standing if each.grant_id == grant_id)

    def released(self) -> None:
        self._views.clear()

    def views(self, region: int, offset: int, nbytes: int) -> list[memoryview] | None:
        """Return so many bytes of a region, in order, or None where it has none there.

        A region that lies in one place gives one view, a scattered one a view for each place. The
        holder of a view keeps the region's memory; `released` waits for no view but those that
        `serve` has.
        """
        view = self._views.get(region)
        if view is None or offset + nbytes > len(view):
            return None
        part = view[offset : offset + nbytes]
        if isinstance(part, memoryview):
            return [part]
        try:
            return [host_view(span) for span in spans_of(part)]
        except LocalError:  # it reaches into a hole
            return None

    @contextlib.contextmanager
    def reading(self, grant: GrantState) -> Iterator[None]:
        """Count a read of the grant as running inside."""
        self.count_reads(grant, +1)
        try:
            yield
        finally:
            self.count_reads(grant, -1)

    def send(
        self, stream: SocketStream, grant: GrantState, head: bytes, views: Sequence[memoryview]
    ) -> None:
        """Send a read's bytes, counted and no faster than the limiter allows.

        Args:
            stream: The reader's connection.
            grant: The reader's grant.
            head: What goes before them, and is not counted.
            views: The bytes, in their order.

        Raises:
            OSError: The connection has ended, or made no progress for `stall_timeout_s`.
        """
        if self._limiter is None:
            left = len(head)

            def on_sent(nbytes: int) -> None:
                nonlocal left
                payload, left = max(0, nbytes - left), max(0, left - nbytes)
                self._count_sent(grant, payload)

            stream.send_all([head, *views], on_sent)
            return
        stream.send_all([head])
        for parts in limiting.paced(
            views,
            self._limiter,
            grant.grant_id,
            lambda: len(grant.streams),
            lambda: grant.revoked,
        ):
            stream.send_all(parts)
            self._count_sent(grant, sum(map(len, parts)))

    def _count_sent(self, grant: GrantState, nbytes: int) -> None:
        with self.lock:
            self._sent_bytes += nbytes
            grant.sent_nbytes += nbytes


def _in_host(view: View) -> memoryview | ScatteredView:
    """Return a view whose bytes are all in host memory. Raises LocalError if some are not."""
    if isinstance(view, ScatteredView):
        if view.places() is None:  # else it is known to be in host memory
            for span in view.located()[1]:
                host_view(span)
        return view
    return host_view(view)
