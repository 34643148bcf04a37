"""Who counts as this process's user, with real users and user namespaces."""

from __future__ import annotations

import ast
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.daemon import ROOT
from tests.support.privileges import NOBODY, as_root
from tests.support.user_namespaces import OVERFLOW_UID, inside, overflow_uid, user_namespace

#: A user that no namespace here maps, and one that they do.
OTHER, MAPPED = 4321, 1000

#: Says for each line of input, which is the name of an abstract unix socket, as what user the
#: kernel shows the process that listens there, and whether that is this process's user.
LOOK = """
import json, os, socket, sys
for line in sys.stdin:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\\0" + line.strip())
        shown = users.peer_credentials(sock)[1], users.is_own_peer(sock)
        print(json.dumps([os.geteuid(), *shown, users.ambiguity()]), flush=True)
"""


@contextmanager
def listening(uid: int) -> Iterator[str]:
    """A process of a user that listens at an abstract unix socket, whose name this gives."""
    name = f"mx-test-{secrets.token_hex(8)}"
    code = f"""
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
sock.bind("\\0{name}"); sock.listen()
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield name
        finally:
            process.stdin.close()


def looks(process: subprocess.Popen[str], name: str) -> tuple[int, int, bool, str]:
    """Return a LOOK's own uid, that of the process that listens, whether it is one user, and why
    that can't be known."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    own, shown, same, why = json.loads(process.stdout.readline())
    return own, shown, same, why


def looking(pid: int, uid: int, before: str = "") -> AbstractContextManager[subprocess.Popen[str]]:
    return inside(pid, uid, LOOK, before=f"from mx import users\n{before}")


@as_root
def test_where_some_user_is_not_mapped_the_overflow_uid_is_no_user() -> None:
    with (
        user_namespace(0, MAPPED, NOBODY) as pid,
        listening(OTHER) as other,
        listening(NOBODY) as nobody,
        listening(MAPPED) as mapped,
    ):
        with looking(pid, NOBODY) as process:
            for name in (other, nobody):  # they look the same
                own, shown, same, why = looks(process, name)
                assert (own, shown, same) == (NOBODY, NOBODY, False)
                assert f"this process's uid {NOBODY}" in why
            assert looks(process, mapped)[1:3] == (MAPPED, False)
        with looking(pid, MAPPED) as process:
            assert looks(process, mapped) == (MAPPED, MAPPED, True, "")
            assert looks(process, other) == (MAPPED, NOBODY, False, "")


@as_root
def test_where_every_user_is_mapped_nobody_is_a_user() -> None:
    with listening(OTHER) as other, listening(NOBODY) as nobody, looking(0, NOBODY) as process:
        assert looks(process, nobody) == (NOBODY, NOBODY, True, "")
        assert looks(process, other) == (NOBODY, OTHER, False, "")


@as_root
def test_a_process_that_is_not_mapped_itself_knows_no_user() -> None:
    """Its own uid is the overflow uid then, as is each other one's."""
    code = "import ctypes, json, os, socket, sys; from mx import users\n"
    code += "os.setgroups([]); os.setresuid(*3 * (4321,)); ctypes.CDLL(None).unshare(0x10000000)\n"
    code += LOOK
    with (
        listening(OTHER) as other,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            own, shown, same, why = looks(process, other)
        finally:
            assert process.stdin is not None
            process.stdin.close()
    if own == OTHER:
        pytest.skip("the kernel lets only root make user namespaces")
    assert (own, shown, same) == (NOBODY, NOBODY, False) and why


@as_root
def test_the_kernel_says_what_the_overflow_uid_is() -> None:
    with (
        user_namespace(0, MAPPED) as pid,
        listening(OTHER) as other,
        listening(MAPPED) as mapped,
        looking(pid, MAPPED) as process,
    ):
        assert looks(process, mapped) == (MAPPED, MAPPED, True, "")
        with overflow_uid(MAPPED):
            found = [looks(process, name) for name in (other, mapped)]
        assert looks(process, mapped) == (MAPPED, MAPPED, True, "")
    # The first is how the attack looks: the kernel shows another user by this process's uid.
    assert [each[:3] for each in found] == [(MAPPED, MAPPED, False)] * 2
    assert all(each[3] for each in found)


@as_root
def test_what_can_not_be_read_is_not_assumed(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").touch()
    hide = f"""
import ctypes
libc = ctypes.CDLL(None)
assert not libc.unshare(0x00020000)
assert not libc.mount(b"", b"/", b"none", ctypes.c_ulong(1 << 14 | 1 << 19), None)
assert not libc.mount({os.fsencode(empty)!r}, {os.fsencode(OVERFLOW_UID)!r}, None, 1 << 12, None)
"""
    with (
        user_namespace(0, MAPPED) as pid,
        listening(MAPPED) as mapped,
        looking(pid, MAPPED, before=hide) as process,
    ):
        own, shown, same, why = looks(process, mapped)
        assert (own, shown, same) == (MAPPED, MAPPED, False) and why
    with listening(MAPPED) as mapped, looking(0, MAPPED, before=hide) as process:
        assert looks(process, mapped)[2]  # every user is mapped: there is no overflow uid


#: What takes files and folders for this user's alone, or for code that no other user can change:
#: each is given a folder, and returns or raises.
BELIEVERS = """
import json, os, sys
from pathlib import Path
from mx import keyfile
from mx import private as artifacts, trustfile as trust
from mx.coordinator.stores.sqlite import SqliteStore
from mx.engines.replica import metrics
from mx.errors import MxError
from mx.storage import folders
from mx.storage.folder_index import FolderIndex
from mx.wire import private
believers = {
    "caches": lambda at: artifacts.check_private(at),
    "default key": lambda at: keyfile.require_own_folder(at / "none"),
    "index": lambda at: FolderIndex(at).record([(1, 2, 3, 4, 5)], "00" * 32, 1 << 62),
    "key": lambda at: keyfile.read(at / "key"),
    "link": lambda at: os.close(folders.resolve(str(at / "link")).fd),
    "metrics": lambda at: metrics._require_private(at),
    "output": lambda at: folders.is_private(os.open(at, 0), os.open(at.parent, 0)),
    "socket": lambda at: private.check_folder(at / "socket"),
    "state": lambda at: SqliteStore(str(at / "state"))._read_all(),
    "trust file": lambda at: trust._read(at / "trust"),
}
"""
TRY = """
def believed(believer, at):
    try:
        return believer(at) is not False
    except (MxError, OSError, folders.ForeignLinkError):
        return False
for where in map(Path, sys.argv[1:]):
    print(json.dumps([name for name, each in believers.items() if believed(each, where)]))
"""


def folder_of(uid: int, at: Path, mode: int) -> Path:
    at.mkdir(mode=mode)
    (at / "key").write_bytes(bytes(32))
    (at / "trust").touch()
    (at / "link").symlink_to("trust")
    for name in ("key", "trust"):
        (at / name).chmod(mode & 0o666)
    for each in (at, *at.iterdir()):
        os.chown(each, uid, uid, follow_symlinks=False)
    return at


@as_root
def test_files_of_a_user_that_is_not_mapped_are_not_believed(tmp_path: Path) -> None:
    """They have the reader's own uid, and only the kernel knows whose they are. Of a link it does
    not say that."""
    own = folder_of(NOBODY, tmp_path / "own", 0o700)
    others = folder_of(OTHER, tmp_path / "others", 0o700)
    readable = folder_of(OTHER, tmp_path / "readable", 0o755)
    with (
        user_namespace(0, NOBODY) as pid,
        inside(pid, NOBODY, TRY, own, others, readable, before=BELIEVERS) as process,
    ):
        out, _ = process.communicate(timeout=60)
    of_own, of_others, of_readable = map(json.loads, out.splitlines())
    assert of_own == [
        "caches", "default key", "index", "key", "metrics", "output", "socket", "state",
        "trust file",
    ]  # fmt: skip
    assert of_others == of_readable == []


RANKS = """
import logging, sys, time
from mx.core.local_ranks import LocalRanks
from mx.fetching.ranks import meet
from tests.support.local_exchange import all_of, content_of
from tests.support.transfer_machine import grid_of
"""
MEET = """
logging.basicConfig(stream=sys.stdout)
grid, what = grid_of([4]), content_of("x")
print(meet(LocalRanks(0, 2, "x", wait_s=3600.0), what, grid, all_of(grid), lambda: False))
"""


@as_root
def test_ranks_that_can_not_be_known_are_not_waited_for() -> None:
    with (
        user_namespace(0, NOBODY) as pid,
        inside(pid, NOBODY, MEET, before=RANKS) as process,
    ):
        out, _ = process.communicate(timeout=60)
    assert "rank 0 shares with no other on this host: other users may have" in out
    assert out.splitlines()[-1] == "None"


#: Names by which a program asks who it is, or who is at the other end of a socket.
ASKING = {
    "getuid", "geteuid", "getresuid", "SO_PEERCRED", "SO_PASSCRED", "SO_PEERPIDFD",
    "SCM_CREDENTIALS",
}  # fmt: skip
#: Where places are compared that their processes declare; the kernel is asked as they connect.
DECLARED = ("transports/mx_transports/toolkit/reach.py", "mx/testing/rules_life.py")


def comparisons(source: str) -> list[int]:
    """Return the lines that ask for users or compare them past `mx.users`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "attr", getattr(child, "id", getattr(child, "name", "")))
            # The owner of a file is given to a function, or shown.
            passed = isinstance(node, ast.Call | ast.FormattedValue)
            if name in ASKING or (name == "st_uid" and not passed):
                found.add(getattr(child, "lineno", 0))
        if isinstance(node, ast.Compare):
            inner = {ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.expr)}
            if "users.own()" in inner or any(each.endswith(".uid") for each in inner):
                found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    "source",
    [
        "os.stat(path).st_uid == own",
        "owner = os.fstat(fd).st_uid",
        "status.st_uid in (0, me)",
        "me = os.geteuid()",
        "from os import getuid",
        "sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)",
        "if uid != users.own(): pass",
        "found = here.uid == there.uid",
    ],
)
def test_a_comparison_is_found(source: str) -> None:
    assert comparisons(source) == [1]


def test_no_other_module_compares_users() -> None:
    files = [path for folder in ("mx", "transports") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): comparisons(path.read_text()) for path in files}
    assert all(found.pop(where) for where in ("mx/users.py", *DECLARED))
    assert {where: lines for where, lines in found.items() if lines} == {}
