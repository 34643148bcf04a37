"""User namespaces that map few users, and processes in them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Code after which a process of root is one of user `uid`, in the user namespace of process `pid`;
#: with 0 it stays in its own. It keeps its capabilities in there: Python itself may be where only
#: root can read, who is mapped. On files of users that are not mapped they have no effect.
_ENTER = """
import ctypes, os
def become(pid, uid):
    libc = ctypes.CDLL(None, use_errno=True)
    def call(name, *arguments):
        if getattr(libc, name)(*map(ctypes.c_ulong, arguments)):
            raise OSError(ctypes.get_errno(), f"{{name}}: {{os.strerror(ctypes.get_errno())}}")
    os.setgroups([])
    if pid:
        at = os.open(f"/proc/{{pid}}/ns/user", os.O_RDONLY)
        call("setns", at, 0x10000000)
        os.close(at)
    call("prctl", 28, 1 << 2)  # PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    call("prctl", 4, 1)  # PR_SET_DUMPABLE: its /proc is its own
become({pid}, {uid})
"""


@contextlib.contextmanager
def user_namespace(*mapped: int) -> Iterator[int]:
    """Give the id of a process in a user namespace of its own, in which just these users and groups
    are known, under the same numbers. Skips the test where the kernel allows none."""
    with subprocess.Popen(
        ["unshare", "--user", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write("ready\n")
            process.stdin.flush()
            if process.stdout.readline() != "ready\n":
                assert process.stderr is not None
                pytest.skip(f"no user namespace can be made here: {process.stderr.read()}")
            extents = "".join(f"{each} {each} 1\n" for each in mapped)
            try:
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{process.pid}/{name}").write_text(extents)
            except PermissionError:  # they are not mapped here either
                pytest.skip(f"a user namespace can't have users {mapped} here")
            yield process.pid
        finally:
            process.stdin.close()


def number(pid: int) -> int:
    """Return the number of a process's user namespace."""
    return os.stat(f"/proc/{pid}/ns/user").st_ino


def entering(pid: int, uid: int) -> str:
    """Return code by which a process of root becomes `uid` in the user namespace of a process."""
    return _ENTER.format(pid=pid, uid=uid)


@contextlib.contextmanager
def inside(
    pid: int, uid: int, code: str, *arguments: object, before: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Run code as `uid` in the user namespace of a process, with 0 in this one. What it uses of mx
    is imported in `before`, which root runs. Standard input and output are piped. It ends with the
    block."""
    with subprocess.Popen(
        [sys.executable, "-c", before + entering(pid, uid) + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


@contextlib.contextmanager
def overflow_uid(uid: int) -> Iterator[None]:
    """Have the kernel show unmapped users as `uid` within the block, which ends in milliseconds.

    The number is the whole host's. So a process of its own sets it back when the block ends, when
    this process ends in any way, and after 10 s at the latest; until then it holds a lock, which
    others wait for before they look what the number was. Skips the test where it can't be set.
    """
    with open(OVERFLOW_UID) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read().strip()
        back = f"timeout 10 cat; echo {before} > {OVERFLOW_UID}"
        try:
            OVERFLOW_UID.write_text(before)
        except OSError as error:
            assert error.errno in (errno.EROFS, errno.EACCES, errno.EPERM), error
            pytest.skip(f"the kernel's overflow uid can't be set here: {error.strerror}")
        with subprocess.Popen(
            ["sh", "-c", back],
            stdin=subprocess.PIPE,
            pass_fds=[file.fileno()],
            start_new_session=True,
        ) as guard:
            assert guard.stdin is not None
            try:
                OVERFLOW_UID.write_text(str(uid))
                yield
            finally:
                guard.stdin.close()
    assert OVERFLOW_UID.read_text().strip() == before
