"""An exposure that sends the bytes of a read itself, over the reader's connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, cast

from mx.transport import DeviceView, ExposedRegion, ExposeOptions, Span
from mx_transports.toolkit import limiting
from mx_transports.toolkit.exposure import GrantState, SocketExposure
from mx_transports.toolkit.listeners import Listen, listen
from mx_transports.toolkit.pieces import devices_of, find_piece, find_table
from mx_transports.toolkit.stream import SocketStream

if TYPE_CHECKING:
    from mx_transports.toolkit.pinned import PinnedSender


class SendingExposure(SocketExposure):
    """An exposure that sends the bytes itself. See `mx.transport.Sending`.

    Device memory goes through a bounded ring of pinned memory (`mx_transports.toolkit.pinned`).

    Args:
        regions: The regions to expose, in the memory of the host or of GPUs.
        options: How to listen, and the limiter that `send` keeps to.
        name: What its threads are called.
        magic: The transport and its version, MAGIC_BYTES long.
        listen: The way to listen, which is called with the options.

    Raises:
        LocalError: This process can't listen, or a GPU's memory can't be copied.
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
        self._views = {region.index: region.view for region in regions}
        self._pinned: PinnedSender | None = None
        devices = {device for view in self._views.values() for device in devices_of(view)}
        with contextlib.ExitStack() as undo:
            if devices:  # without any, nothing of CUDA is imported
                from mx_transports.toolkit.pinned import PinnedSender

                self._pinned = PinnedSender(devices, options.on_lost)
                undo.callback(self._pinned.close)
            super().__init__(name=name, magic=magic, options=options, listen=listen)
            undo.pop_all()
        self._limiter = options.limiter
        self._sent_nbytes = 0

    def sent_bytes(self) -> int:
        return self._sent_nbytes

    def sent_to(self, grant_id: str) -> int:
        with self.lock:
            standing = self.grants.values()
            return sum(each.sent_nbytes for each in standing if each.grant_id == grant_id)

    def released(self) -> None:
        self._views.clear()
        if self._pinned is not None:
            self._pinned.close()

    def views(self, region: int, offset: int, nbytes: int) -> list[Span] | None:
        """Return the memory of `nbytes` bytes of a region, in order; None if the region does not
        have them.

        A region that lies in one place gives one view, a scattered one a view for each place. The
        holder of a view keeps the region's memory; `released` waits for no view but those that
        `serve` has. Views of GPU memory can be sent, but not read here.
        """
        return find_piece(self._views, region, offset, nbytes)

    def find(self, table: memoryview) -> list[Span] | None:
        """Return the memory of all pieces of a table, as `views` does of one."""
        return find_table(self._views, table)

    @contextlib.contextmanager
    def reading(self, grant: GrantState) -> Iterator[None]:
        """Count a read of the grant as running inside."""
        self.count_reads(grant, +1)
        try:
            yield
        finally:
            self.count_reads(grant, -1)

    def send(
        self, stream: SocketStream, grant: GrantState, head: bytes, views: Sequence[Span]
    ) -> None:
        """Send a read's bytes, counted and no faster than the limiter allows.

        Args:
            stream: The reader's connection.
            grant: The reader's grant.
            head: Bytes to send before them, which are not counted.
            views: The bytes, in their order.

        Raises:
            OSError: The connection has ended, or made no progress for `stall_timeout_s`; or a GPU's
                memory can't be copied any more.
        """

        def on_sent(nbytes: int) -> None:
            self._count_sent(grant, nbytes)

        if self._limiter is not None:
            stream.send_all([head])
            for parts in limiting.paced(
                views,
                self._limiter,
                grant.grant_id,
                lambda: len(grant.streams),
                lambda: grant.revoked,
            ):
                self._put(stream, parts, on_sent)
        elif self._pinned is not None:
            stream.send_all([head])
            self._put(stream, views, on_sent)
        else:
            left = len(head)

            def on_any_sent(nbytes: int) -> None:
                nonlocal left
                payload, left = max(0, nbytes - left), max(0, left - nbytes)
                on_sent(payload)

            stream.send_all([head, *cast("Sequence[memoryview]", views)], on_any_sent)

    def _put(
        self, stream: SocketStream, views: Sequence[Span], on_sent: Callable[[int], None]
    ) -> None:
        for on_device, run in groupby(views, key=lambda view: isinstance(view, DeviceView)):
            if not on_device:
                stream.send_all(cast("list[memoryview]", list(run)), on_sent)
                continue
            assert self._pinned is not None
            self._pinned.send(stream, cast("list[DeviceView]", list(run)), on_sent)

    def _count_sent(self, grant: GrantState, nbytes: int) -> None:
        with self.lock:
            self._sent_nbytes += nbytes
            grant.sent_nbytes += nbytes


class CompressingExposure(SendingExposure):
    """A `SendingExposure` that may send fewer bytes than its readers get: see
    `mx.transport.Compressing`. `serve` sends what it has packed, and says what that saved."""

    def delivered_to(self, grant_id: str) -> int:
        with self.lock:
            standing = self.grants.values()
            return sum(e.sent_nbytes + e.saved_nbytes for e in standing if e.grant_id == grant_id)

    def saved(self, grant: GrantState, nbytes: int) -> None:
        """Count how many bytes fewer were sent than the reader gets; negative for more."""
        with self.lock:
            grant.saved_nbytes += nbytes
