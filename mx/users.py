"""Whether another process, or the owner of a file, is this process's user: no other module compares
uids. And what tells one process of this machine from all others: its kernel, pid and start time.

Users that a user namespace does not map all have one number in it, the overflow uid, and a process
in there may have that number itself. So where some user is not mapped the overflow uid stands for
no user. Whose a file with that number is, the kernel says in another way. Nothing is kept between
calls: a process may fork, enter another namespace or become another user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

#: How many users there are: each 32-bit number but -1.
_USERS = (1 << 32) - 1
_CREDENTIALS = struct.Struct("3i")  # struct ucred


try:
    #: What identifies the running kernel; "" if it can't be known.
    BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
except OSError:
    BOOT_ID = ""


def own() -> int:
    """Return the uid of this process's user, for names and messages; see `is_own`."""
    return os.geteuid()


def is_own(uid: int, of: int | Path | None = None, *, or_root: bool = False) -> bool:
    """Return True if a user is this process's own, and certainly so.

    Args:
        uid: The user, as the kernel shows it to this process.
        of: What the uid is the owner of: the path of a file or folder, or a descriptor of it. None
            for a process's user, and for a link's owner.
        or_root: Whether root will do.
    """
    if uid != os.geteuid() and not (or_root and uid == 0):
        return False
    return not _is_ambiguous(uid) or (of is not None and _opens_as_owner(of))


def have_one_owner(one: os.stat_result, other: os.stat_result) -> bool:
    """Return True if two files of one file system are shown as the same user's, known or not."""
    return one.st_uid == other.st_uid


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of the process that connected to a unix socket, or listened on it."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def is_own_peer(sock: socket.socket) -> bool:
    """Return True if the process at the other end of a unix socket is certainly this user's."""
    return is_own(peer_credentials(sock)[1])


def ambiguity() -> str:
    """Return why no process can be known as this user's; "" if it can."""
    uid = os.geteuid()
    why = f"other users may have this process's uid {uid}, too: its user namespace does not map "
    why += "every user, and shows those by that number; run it as a user that the namespace maps"
    return why if _is_ambiguous(uid) else ""


def _is_ambiguous(uid: int) -> bool:
    """Return True if the kernel shows this process several users by a uid, for all that is known.

    The maps of namespaces are nested: one that maps every number maps every user.
    """
    mapped = sum(map(int, _text("/proc/self/uid_map").split()[2::3]))
    return mapped < _USERS and _text("/proc/sys/kernel/overflowuid").strip() in (str(uid), "")


def _text(path: str) -> str:
    with contextlib.suppress(OSError):  # such as /proc that is not mounted
        return Path(path).read_text()
    return ""


def _opens_as_owner(of: int | Path) -> bool:
    """Return True if the kernel lets this process do to a file what only its owner may."""
    path = f"/proc/self/fd/{of}" if isinstance(of, int) else of
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_NONBLOCK | os.O_CLOEXEC))
        return True
    return False


def namespace(kind: str) -> int:
    """Return the number of this process's namespace of a kind, such as "pid"; 0 if it can't be
    known."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def process_start_ticks(pid: int) -> int:
    """Return field 22 of /proc/PID/stat, or 0 if the process is gone, or waits to be reaped.

    The pid and this number identify a process even if its pid is reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name is in brackets, and may itself contain spaces and brackets.
    fields = stat[stat.rindex(")") + 2 :].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
