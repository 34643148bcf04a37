"""Closes a parent's descriptors in a forked child: sockets, locked files, shared memory files.

A child that keeps a descriptor keeps its effect: after the parent's end a port stays in use, a
lock stays held, and a peer sees no end of the connection. Modules that make descriptors register
them here, and `give_up` replaces them in the child. Each number stays in use, for /dev/null: the
copied objects still use it, and what they do with it must reach neither the parent's connection
nor a file that the child opens later.
"""

from __future__ import annotations

import contextlib
import logging  # noqa: F401 - before `no_fork` is registered, see there
import os
import socket
import threading
import weakref
from collections.abc import Callable

#: Returns True for a descriptor of mx, given its number and its link in /proc/self/fd.
Belongs = Callable[[int, str], bool]

#: While a thread holds this, no other one forks: a child would keep what is locked half done, as a
#: module that is being imported, for ever. For what ends soon: a fork waits for it. A signal's
#: handler may fork within. What registered later locks before it: `logging`, whose lock is taken
#: within this one, must have registered by now.
no_fork = threading.RLock()
os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_tests: list[Belongs] = []


def own(*sockets: socket.socket) -> None:
    """Register sockets that a forked child must not keep."""
    _sockets.update(sockets)


def recognise(belongs: Belongs) -> None:
    """Register a test for descriptors that a forked child must not keep.

    Args:
        belongs: Returns True for such a descriptor. It may raise OSError, which counts as False.
    """
    _tests.append(belongs)


def give_up() -> None:
    """Replace every registered descriptor by /dev/null. Call this in a forked child."""
    theirs = {sock.fileno() for sock in list(_sockets)}
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
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
