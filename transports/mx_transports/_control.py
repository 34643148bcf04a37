"""What a source and a reader of one machine share beside the bytes: who the other is, and a page.

The page is a memfd that the source writes and its reader maps: whether the grant still stands, and
the memory's generation, are known without asking.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

from mx import forks
from mx_transports import _vm as vm

#: The control page, in this machine's byte order: generation, whether the grant has ended.
CONTROL = struct.Struct("=QQ")
CONTROL_BYTES = mmap.PAGESIZE
_NAME = "mx-control"
forks.recognise(lambda fd, link: link.startswith(f"/memfd:{_NAME}"))


class Control:
    """One grant's page, written here and read by its reader without a round trip."""

    def __init__(self) -> None:
        """Raises OSError where there are no descriptors or no memory left."""
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, CONTROL_BYTES)
            self._page = mmap.mmap(self.descriptor, CONTROL_BYTES)
            # The mapping above stays writable; nobody gets another such.
            vm.add_seals(
                self.descriptor,
                vm.F_SEAL_SHRINK | vm.F_SEAL_GROW | vm.F_SEAL_FUTURE_WRITE | vm.F_SEAL_SEAL,
            )
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, generation: int, ended: bool) -> None:
        CONTROL.pack_into(self._page, 0, generation, ended)

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)


class Controls:
    """The pages of one exposure's grants, by key. A page is made when its grant's reader connects,
    which only a process of this machine can; the exposure's lock is held in every call."""

    def __init__(self) -> None:
        self._pages: dict[bytes, Control] = {}

    def descriptor(self, key: bytes, generation: int) -> int:
        """A new descriptor of the grant's page; the caller's to close. Raises OSError."""
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = Control()
            page.write(generation, False)
        return os.dup(page.descriptor)

    def write(self, key: bytes, generation: int, ended: bool) -> None:
        """What the grant's reader is to see, if it has connected; the last of it if it ended."""
        page = self._pages.get(key)
        if page is not None:
            page.write(generation, ended)
            if ended:
                self._pages.pop(key).close()


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected to a unix socket, or that listened on it."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid
