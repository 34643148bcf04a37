"""Sources and readers of one machine and one user, over abstract unix sockets.

The kernel names the process that listens, but the ticket may have come from another one, of any
user, that relays a ticket of this process for other weights. So this process says itself which
weights it serves, and a reader that wants others leaves.

Over the connection go descriptors: of memory, and of the grant's control page, a memfd that the
source writes and its reader maps. Whether the grant still stands, and the memory's generation,
are known from it without a round trip. The connection then stays open: its end notifies the reader
that the source is gone, and the source that the reader is.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from dataclasses import replace

from mx import forks
from mx.contexts import Undo
from mx.errors import PeerLostError, PeerProtocolError, PeerTimeoutError
from mx.transport import MAX_CONTENT_BYTES, ExposeOptions, Grant
from mx_transports.toolkit import dial, framing, kernel, unix
from mx_transports.toolkit.exposure import GrantState, SocketExposure
from mx_transports.toolkit.stream import SocketStream

#: Entries that are sent together; the kernel takes at most 253 descriptors at once.
BATCH = 64
#: The control page, in this machine's byte order: generation, whether the grant has ended.
CONTROL = struct.Struct("=QQ")
CONTROL_BYTES = mmap.PAGESIZE
#: What is sent with the control page: the generation, the bytes of its content's label, the label.
_CONTENT = struct.Struct(f"!QB{MAX_CONTENT_BYTES}s")
_CONTROL_NAME = "mx-control"
forks.recognise(lambda fd, link: link.startswith(f"/memfd:{_CONTROL_NAME}"))


class _ControlPage:
    """One grant's page, which the source writes and the reader reads without a round trip."""

    def __init__(self) -> None:
        """Raises OSError where there are no descriptors or no memory left."""
        self.descriptor = os.memfd_create(_CONTROL_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with Undo(os.close, self.descriptor):
            os.ftruncate(self.descriptor, CONTROL_BYTES)
            self._page = mmap.mmap(self.descriptor, CONTROL_BYTES)
            # The mapping above stays writable; no other process gets another such.
            kernel.add_seals(
                self.descriptor,
                kernel.F_SEAL_SHRINK
                | kernel.F_SEAL_GROW
                | kernel.F_SEAL_FUTURE_WRITE
                | kernel.F_SEAL_SEAL,
            )

    def write(self, generation: int, ended: bool) -> None:
        CONTROL.pack_into(self._page, 0, generation, ended)

    def close(self) -> None:
        """Idempotent."""
        self._page.close()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LocalExposure(SocketExposure):
    """An exposure to processes of this machine and user, with a control page for each grant.

    Args:
        name: What its threads are called.
        magic: The transport and its version.
        options: The options, of which the stall timeout and the content's label are used.

    Raises:
        LocalError: No socket could be made.
    """

    def __init__(self, *, name: str, magic: bytes, options: ExposeOptions) -> None:
        #: The pages by the grant's key, each made when its reader connects; under `lock`.
        self._pages: dict[bytes, _ControlPage] = {}
        #: The label of what the memory holds, at the first generation that is set; under `lock`.
        self._content = options.content
        self._has_generation = False
        super().__init__(name=name, magic=magic, options=options, listen=unix.listen)

    def regenerate(self, generation: int) -> None:
        if self._has_generation and generation != self.generation:
            self.withdraw_content()
        self._has_generation = True

    def withdraw_content(self) -> None:
        """Remove the description of the memory, which is changing; `lock` is held."""
        self._content = b""

    def changed(self, grant: GrantState) -> None:
        page = self._pages.get(grant.key)
        if page is not None:
            page.write(self.generation, grant.revoked)
            if grant.revoked:
                self._pages.pop(grant.key).close()

    def send_control(self, stream: SocketStream, grant: GrantState, data: bytes) -> bool:
        """Send a reader the descriptor of its control page, and the description of the memory.

        Args:
            stream: The reader's connection.
            grant: The reader's grant.
            data: Further bytes of the transport's own.

        Returns:
            False if nothing was sent, since the grant has ended.

        Raises:
            OSError: The connection has ended, or no page could be made.
        """
        with self.lock:
            if grant.revoked:
                return False
            page = self._pages.get(grant.key)
            if page is None:
                page = self._pages[grant.key] = _ControlPage()
                page.write(self.generation, False)
            content = _CONTENT.pack(self.generation, len(self._content), self._content)
            control = os.dup(page.descriptor)
        try:
            stream.send_descriptors(content + data, [control])
        finally:
            os.close(control)
        return True


class LocalTicket:
    """A ticket of a LocalExposure.

    Raises:
        PeerProtocolError: It is malformed.
    """

    def __init__(self, data: bytes, peer: str) -> None:
        decoded = framing.decode_ticket(data, peer)
        self.fields = decoded.fields
        _, self.pid = unix.named(decoded, peer)
        self.start_ticks = self.fields.get("start_ticks")

    @property
    def is_own(self) -> bool:
        """Whether the source is this very process."""
        return self.pid == os.getpid() and self.start_ticks == kernel.start_ticks(self.pid)


class LocalSource:
    """A reader's side of a LocalExposure: connection, control page, descriptors, pidfd.

    Args:
        path: The transport's name, for errors.
        magic: The magic of the exposure.
        grant: The grant.
        ticket: The grant's ticket.
    """

    def __init__(self, path: str, magic: bytes, grant: Grant, ticket: LocalTicket) -> None:
        self.path, self.peer, self.grant, self.ticket = path, grant.peer, grant, ticket
        #: What came of descriptors. Closed with the source, unless taken out of the list.
        self.descriptors: list[int] = []
        self._magic = magic
        self._stream: SocketStream | None = None
        self._pidfd = -1
        self._control: mmap.mmap | None = None

    def connect(self) -> None:
        """Connect, present the secret, and receive the source's greeting.

        Raises:
            SourceError: That fails. The caller closes the source all the same.
        """
        peer = self.peer
        try:
            self._greet()
        except TimeoutError as error:
            raise PeerTimeoutError(f"{peer} does not answer: {error}", peer=peer) from error
        except OSError as error:
            raise PeerLostError(
                f"{peer} can't be reached by {self.path}: {error.strerror or error}", peer=peer
            ) from error
        except ValueError as error:
            raise self.wrong(f"its greeting is malformed: {error}") from error

    def receive_greeting(self) -> None:
        """Receive what the source sends first. A subclass begins with `receive_control`."""
        raise NotImplementedError

    def _greet(self) -> None:
        # Opened before the connection proves who listens: whatever is read by pid later comes
        # from this very process, as long as the pidfd says that it lives.
        self._pidfd = os.pidfd_open(self.ticket.pid)
        (self._stream,) = dial.open_streams(
            self._magic, replace(self.grant, streams=1), unix.connect
        )
        self.receive_greeting()
        if kernel.start_ticks(self.ticket.pid) != self.ticket.start_ticks:
            raise self.gone()

    def receive_control(self, head: struct.Struct) -> tuple[int, ...]:
        """Receive what `send_control` sent, map the page, and return the fields of `head`.

        Raises:
            SourceError: The source does not serve what the grant is for.
        """
        data, control = self.receive(_CONTENT.size + head.size, 1)
        generation, nbytes, label = _CONTENT.unpack_from(data)
        if len(control) != 1 or nbytes > MAX_CONTENT_BYTES:
            raise self.wrong("its greeting is malformed")
        self._check_content(generation, label[:nbytes])
        if (
            not kernel.seals(control[0]) & kernel.F_SEAL_SHRINK
            or os.fstat(control[0]).st_size != CONTROL_BYTES
        ):
            raise self.wrong("its control page is not sealed")
        self._control = mmap.mmap(control[0], CONTROL_BYTES, prot=mmap.PROT_READ)
        return head.unpack_from(data, _CONTENT.size)

    def _check_content(self, generation: int, content: bytes) -> None:
        """Raise SourceError if the grant is for other weights than the source's process serves."""
        wanted = self.grant.content
        if not wanted:
            return
        holder = "the process that holds its memory"
        if content and content != wanted:
            raise self.wrong(f"{holder} serves other weights than it says")
        if generation != self.grant.generation:
            # The label is of another generation, and says nothing about the grant's.
            raise framing.refusal(framing.STALE, self.peer)
        if not content:
            raise self.wrong(f"{holder} does not say which weights it serves")

    def receive(self, nbytes: int, at_most: int) -> tuple[bytearray, list[int]]:
        """Receive `nbytes` bytes and up to `at_most` descriptors, which this object closes."""
        assert self._stream is not None
        data = bytearray(nbytes)
        found = self._stream.fill_descriptors(memoryview(data), at_most)
        self.descriptors += found
        return data, found

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has."""
        assert self._stream is not None
        self._stream.fill(view)

    # --- while it is open

    def register(self, poll: select.poll) -> None:
        """Register the connection and the process's pidfd with `poll`."""
        assert self._stream is not None
        poll.register(self._stream.fileno(), select.POLLIN | select.POLLRDHUP)
        poll.register(self._pidfd, select.POLLIN)

    def check(self, poll: select.poll) -> None:
        """Raise SourceError if what was just read must not be used."""
        self.check_grant()
        if poll.poll(0):
            raise self.gone()

    def check_grant(self) -> None:
        """Raise SourceError if the grant has ended or the memory has changed."""
        assert self._control is not None
        now, ended = CONTROL.unpack_from(self._control)
        if ended:
            raise framing.refusal(framing.REFUSED, self.peer)
        if now != self.grant.generation:
            raise framing.refusal(framing.STALE, self.peer)

    def notify(self, byte: bytes) -> None:
        """Send the source a byte, unless it does not receive."""
        assert self._stream is not None
        self._stream.notify(byte)

    def send(self, byte: bytes) -> None:
        """Send the source a byte. Raises PeerLostError if the source is gone."""
        assert self._stream is not None
        try:
            self._stream.send_all([byte])
        except OSError as error:
            raise self.gone() from error

    def close(self) -> None:
        """Close everything, the connection last: its end tells the source that the rest is closed.
        Idempotent."""
        if self._control is not None:
            self._control.close()
        while self.descriptors:
            os.close(self.descriptors.pop())
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        if self._stream is not None:
            self._stream.close()

    def wrong(self, what: str) -> PeerProtocolError:
        """Return the error for something that the source should not have sent."""
        return PeerProtocolError(f"{self.peer}: {what}", peer=self.peer)

    def gone(self) -> PeerLostError:
        """Return the error for a source whose process has ended."""
        return PeerLostError(f"{self.peer}: the source's process is gone", peer=self.peer)
