"""How a process that used ucx ends: with its own exit code, and all of its own work done.

UCX's modules bring a second libnl into the process where rdma-core is installed, which has ended
such processes by SIGSEGV after everything else was right.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from mx_transports.ucx import nixl
from tests.support import rdma_core

pytestmark = [
    pytest.mark.skipif(nixl.find() is None, reason="NIXL is not installed"),
    pytest.mark.integration,
]
with_rdma_core = pytest.mark.skipif(not rdma_core.installed(), reason=rdma_core.MISSING)
without_rdma_core = pytest.mark.skipif(
    not rdma_core.can_hide(), reason="hiding rdma-core takes root and unshare"
)

#: argv: the module search path, who makes the first agent, how the process ends.
_PROGRAM = """
import atexit, ctypes, json, os, signal, sys, threading, time
sys.path[:] = json.loads(sys.argv[1])
first, ending = sys.argv[2:]
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p

def at_c_exit(text):
    libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(text)), None)

at_c_exit(b"C handler from before")
from mx_transports.ucx import nixl
if first == "other":
    bindings = nixl._bindings("peer")
    other = bindings.nixlAgent("other", bindings.nixlAgentConfig())
    other.createBackend("UCX", {})
    del other
agent = nixl.TargetAgent("peer", "lo")
if ending != "open":
    agent.close()
at_c_exit(b"C handler from after")
atexit.register(print, "atexit")

def late():
    threading.main_thread().join()
    print("thread")

threading.Thread(target=late).start()
if ending == "raises":
    raise ValueError
if ending == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
if ending.isdigit():
    sys.exit(int(ending))
"""
PYTHONS = ["thread", "atexit"]
BEFORE, AFTER = "C handler from before", "C handler from after"

Around = Callable[[Sequence[str]], Sequence[str]]


def end(first: str, ending: str, around: Around = list) -> tuple[int, list[str]]:
    """Run the program; returns its exit code and what was printed at its end."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), first, ending]
    done = subprocess.run(
        around(command),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("ending", "code"), [("returns", 0), ("open", 0), ("6", 6), ("raises", 1)])
def test_the_exit_code_and_all_that_runs_at_exit_are_the_programs_own(
    ending: str, code: int
) -> None:
    assert end("mx", ending) == (code, [*PYTHONS, AFTER, BEFORE])


def test_a_signal_ends_it_as_any_other() -> None:
    code, _ = end("mx", "signal")
    assert code == -15


@with_rdma_core
@pytest.mark.parametrize(("ending", "code"), [("returns", 0), ("6", 6), ("raises", 1)])
def test_who_used_nixl_before_mx_loses_c_handlers_from_before_but_not_the_exit_code(
    ending: str, code: int
) -> None:
    """It was too late to load rdma-core apart: then nothing after mx's own end may run."""
    assert end("other", ending) == (code, [*PYTHONS, AFTER])


@without_rdma_core
@pytest.mark.parametrize(("first", "ending", "code"), [("mx", "6", 6), ("other", "returns", 0)])
def test_without_rdma_core_nothing_is_skipped(first: str, ending: str, code: int) -> None:
    assert end(first, ending, rdma_core.hidden_from) == (code, [*PYTHONS, AFTER, BEFORE])
