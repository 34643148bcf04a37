"""Arenas: pieces of host memory that hold a model in layer-space layout.

A target usually receives into a `HostArena`: anonymous memory in one piece, with huge pages where
the kernel gives them. The first write to a page faults it in. Populating the pages ahead made
everything wait that needs the address space's lock, thread starts included (in a pull over tcp,
14 ms to the first read instead of 9). Other processes can attach to a `MemfdArena`: it is filled
through a writable map, then sealed, and from then on read-only for all.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from mx import forks
from mx.buffers import HUGE_PAGE_BYTES, address_of, advise, map_at, map_private, map_shared, seal
from mx.core.digest import BlockHasher
from mx.errors import CapacityError, ClosedError, LocalError
from mx.memory.budget import require
from mx.transport import DeviceView, Span, View, contiguous
from mx.units import format_bytes

if TYPE_CHECKING:
    from mx.memory.device import DeviceArena
    from mx.memory.pinned import PinnedArena

#: Prefix of the names of memory files, whose descriptors other processes have received too.
_MEMFD_PREFIX = "mx:"
forks.recognise(lambda fd, link: link.startswith(f"/memfd:{_MEMFD_PREFIX}"))


class Hasher(Protocol):
    """Hashes blocks while they land; `mx.core.digest.BlockHasher` is one."""

    def landed(self, payload_nbytes: int) -> None: ...
    def block_digests(self) -> bytes: ...


#: Makes a hasher for blocks that land in these views of an arena.
MakeHasher = Callable[[Sequence[Span]], Hasher]


#: Makes a hasher for blocks that land in views of host memory, which are memoryviews.
host_hasher = cast("MakeHasher", BlockHasher)


class HostMemory:
    """What all arenas of host memory share."""

    #: Makes hashers for blocks that land in the arena.
    hasher: MakeHasher = host_hasher
    #: The file that other processes can attach to, if there is one.
    memfd: int | None = None
    view: View

    def private_view(self) -> View:
        """Return the memory for tensors to be views of: the arena itself."""
        return self.view

    def release(self) -> None:
        """Drop this object's reference to the memory. Idempotent."""
        self.view = memoryview(b"")


class HostArena(HostMemory):
    """Anonymous private memory of `nbytes`, aligned to huge pages, or `shift` bytes after it.

    `view` is writable and lives as long as anything refers to it; `release` only drops this
    object's own reference. Raises CapacityError before allocating more than is free.
    """

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        require(nbytes, "the model")
        try:
            mapping = mmap.mmap(-1, nbytes + shift + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            raise CapacityError(
                f"{format_bytes(nbytes)} of memory could not be mapped: {error.strerror}",
                hint="raise the address-space limit (ulimit -v) or overcommit",
            ) from error
        whole = memoryview(mapping)
        skip = -address_of(whole) % HUGE_PAGE_BYTES
        advise(address_of(whole) + skip, nbytes + shift, mmap.MADV_HUGEPAGE)
        self.view: memoryview = whole[skip + shift : skip + shift + nbytes]
        self.address = address_of(whole) + skip + shift


class MemfdArena(HostMemory):
    """A memfd of `nbytes`: writable through `view` until `seal`, then immutable.

    After `seal`, `view` is a read-only shared map and `memfd` may be given to other processes;
    every earlier view must have been dropped. `release` closes the descriptor; maps that other
    processes made stay valid.

    Raises:
        CapacityError: There is too little memory.
        LocalError: The process has too many open files.
    """

    #: Check that the memory is free before allocating it; False where the memfd stays sparse.
    require_memory = True

    def __init__(self, nbytes: int, *, name: str = "mx") -> None:
        if self.require_memory:
            require(nbytes, "the model")
        self.nbytes = nbytes
        self.sealed = False
        # The kernel accepts at most 249 bytes and no NUL.
        label = f"{_MEMFD_PREFIX}{name}".replace("\0", "").encode()[:200].decode(errors="ignore")
        try:
            self.memfd: int | None = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise LocalError(
                f"no memfd could be created: {error.strerror}",
                hint="raise the limit of open files (ulimit -n)",
            ) from error
        # Once, whichever comes first: `release`, or the end of an arena that was never released.
        self._finalizer = weakref.finalize(self, os.close, self.memfd)
        self._finalizer.atexit = False
        try:
            os.ftruncate(self.memfd, nbytes)
            # Sealed before anything maps it, so that no truncation can cause a SIGBUS here.
            fcntl.fcntl(self.memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._mapping = mmap.mmap(self.memfd, nbytes) if nbytes else None
        except OSError as error:
            self._close()
            raise CapacityError(
                f"a memfd of {format_bytes(nbytes)} could not be created: {error.strerror}",
                hint="free memory or raise the container's limit",
            ) from error
        self.view: memoryview = memoryview(
            self._mapping if self._mapping is not None else bytearray()
        )

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return address_of(self.view)

    def seal(self) -> None:
        """Unmap the memory, seal it (SHRINK|GROW|WRITE|SEAL) and map it read-only.

        Raises:
            LocalError: Another writable map or view of it exists.
            ClosedError: The arena was released.
        """
        if self.sealed:
            return
        if self.memfd is None:
            raise ClosedError("the arena was released")
        self.view.release()
        if self._mapping is not None:
            try:
                self._mapping.close()
            except BufferError:
                gc.collect()  # a view in a reference cycle, such as a traceback's frame
                try:
                    self._mapping.close()
                except BufferError as error:
                    raise LocalError("the arena can't be sealed: a view of it is left") from error
        _seal_writes(self.memfd)
        if self._mapping is not None:
            self._mapping = None
            self.view = map_shared(self.memfd, self.nbytes)
        else:
            self.view = memoryview(b"")
        self.sealed = True

    def freeze(self) -> None:
        """Seal the memory while it is read at its present addresses.

        A private read-only map replaces the writable one in place. Existing views stay valid; do
        not write to them any more.

        Raises:
            LocalError: Another writable map exists.
            ClosedError: The arena was released.
        """
        if self.sealed:
            return
        if self.memfd is None:
            raise ClosedError("the arena was released")
        if self.nbytes:
            try:
                map_at(
                    self.address,
                    self.nbytes,
                    descriptor=self.memfd,
                    protection=mmap.PROT_READ,
                    flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE,
                )
            except OSError as error:
                raise LocalError(
                    f"the arena could not be mapped read-only: {error.strerror}"
                ) from error
        _seal_writes(self.memfd)
        self.view = self.view.toreadonly()
        self.sealed = True

    def private_view(self) -> memoryview:
        """Return a new private, writable map of the memory.

        Writing to it changes no other process's bytes. It lives as long as anything refers to it.

        Raises:
            LocalError: The memory can't be mapped.
            ClosedError: The arena was released.
        """
        if self.memfd is None:
            raise ClosedError("the arena was released")
        if not self.nbytes:
            return memoryview(bytearray())
        try:
            return map_private(self.memfd, self.nbytes)
        except OSError as error:
            raise LocalError(
                f"{format_bytes(self.nbytes)} could not be mapped: {error.strerror}"
            ) from error

    def release(self) -> None:
        """Close the descriptor and drop the map. Idempotent."""
        self.view = memoryview(b"")
        self._mapping = None
        self._close()

    def _close(self) -> None:
        memfd, self.memfd = self.memfd, None
        if memfd is not None and self._finalizer.detach() is not None:
            os.close(memfd)


def _seal_writes(descriptor: int) -> None:
    """Seal a memory file against writing, and against other seals.

    Raises:
        LocalError: A writable map exists, or something keeps its pages.
    """
    try:
        seal(descriptor, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise LocalError(f"the arena can't be sealed: {error.strerror}") from error
        raise LocalError(
            "the arena can't be sealed: a writable map is left, or its pages are in use",
            hint="try again; it happens where memory is scarce",
        ) from None


class BorrowedArena(HostMemory):
    """Memory with another owner.

    It is a source's sealed memfd mapped privately (writes stay in this process), a source's GPU
    memory, which may be scattered, or a buffer of the caller's to fill.
    """

    def __init__(self, view: View) -> None:
        self.view = view

    @property
    def address(self) -> int:
        """The address of the first byte, in the host or on the GPU."""
        view = contiguous(self.view)
        return view.address if isinstance(view, DeviceView) else address_of(view)


#: Memory in one piece, laid out by mx.
Arena: TypeAlias = "HostArena | MemfdArena | BorrowedArena | PinnedArena | DeviceArena"
