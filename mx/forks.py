"""What a forked child must not keep of its parent's: sockets, locked files, shared memory files.

A child that keeps a descriptor keeps what it stands for: a port stays taken, a lock stays held
and a peer hears of no end, although the parent is gone. Modules that make descriptors say here
which those are; `give_up` lets go of them in the child. Each number stays in use, for a file of
no meaning: the objects that were copied with the process believe that it is theirs, and what they
do with it must reach neither the parent's connection nor a file that the child opens later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable

#: Says of a descriptor, and what /proc says that it is, whether it belongs to mx.
Belongs = Callable[[int, str], bool]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_tests: list[Belongs] = []


def own(*sockets: socket.socket) -> None:
    """These sockets are this process's alone, as long as they are open."""
    _sockets.update(sockets)


def recognise(belongs: Belongs) -> None:
    """What `belongs` returns True for is this process's alone. It may raise OSError."""
    _tests.append(belongs)


def give_up() -> None:
    """In a forked child: let go of every descriptor that is the parent's alone."""
    theirs = {sock.fileno() for sock in list(_sockets)}
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own is gone by now
            link = os.readlink(f"/proc/self/fd/{name}")
            if fd in theirs or any(_passes(test, fd, link) for test in _tests):
                _replace(fd)
    _sockets.clear()


def _passes(test: Belongs, fd: int, link: str) -> bool:
    try:
        return test(fd, link)
    except OSError:
        return False


def _replace(fd: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nothing, fd, inheritable=False)
    finally:
        os.close(nothing)
