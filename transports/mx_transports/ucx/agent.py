"""The program that an exposure of `ucx` runs: one NIXL agent, with no secrets.

UCX in software enforces no bounds: a process that reaches an agent's port can read and write all
of the process that it lives in. So the source's agents live here: a process that maps the sealed
memfds read-only, and has neither keys nor tokens nor sockets of the source. The worst that a forged
peer can do is to end it.

Run by path, isolated and without site-packages; imports nothing but the standard library and
NIXL's extension module, by its path. argv[1] is JSON: `bindings`, the path; `control`, a socket;
`regions`, pairs of descriptor and nbytes. UCX is set up by the environment. The program answers
with a line of JSON on the control socket: `metadata` in hexadecimal and `addresses`, or `error`.
Then it receives there BUSY when reads begin, IDLE when the last one has ended; the program ends
with the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from types import ModuleType
from typing import Any

BUSY, IDLE = b"B", b"I"

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PROT_READ, _MAP_SHARED = 1, 1
#: The system's rdma-core, by what all of it is built on, and the libraries that this needs.
_RDMA_CORE, _LIBNL, _LIBNL_ROUTE = "libibverbs.so.1", "libnl-3.so.200", "libnl-route-3.so.200"
#: While no read runs, UCX gets to look after its connections this often: 0.1% of a core.
IDLE_POLL_S = 0.05
#: Polls between two looks at anything else, and what each takes at most if it finds nothing (1.5
#: us; one that moves bytes takes 20 and more).
POLLS = 8
NOTHING_S = 4e-6
#: While reads run and there was nothing to do for no longer than this, an agent leaves its core to
#: another thread and polls on: a sleep takes 60 us and more, for which the other side waits.
YIELD_S = 300e-6
#: A pause after that takes a quarter of the time for which there has been nothing, so that one of
#: several agents whose links are slow leaves the cores to the others. The longest is for readers
#: that have begun a read and do not go on with it.
_LONGEST_PAUSE_S = 2.56e-3


def pause_s(nothing_s: float) -> float:
    """Return how long to pause where there has been nothing to do for so long."""
    return min(nothing_s / 4, _LONGEST_PAUSE_S)


def load_bindings(path: str) -> ModuleType:
    """Load NIXL's extension module alone: its package would import numpy."""
    loader = importlib.machinery.ExtensionFileLoader("_bindings", path)
    spec = importlib.util.spec_from_file_location("_bindings", path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def failures(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions that NIXL has (they have no base of their own), and pybind11's."""
    own = [kind for kind in vars(nixl).values() if isinstance(kind, type)]
    return (
        *(kind for kind in own if issubclass(kind, Exception)),
        RuntimeError,
        TypeError,
        ValueError,
    )


def load_rdma_core() -> None:
    """Load the system's rdma-core, where there is one, before UCX does.

    NIXL's wheel has copies of libibverbs and libnl under names of their own. UCX's module for EFA
    needs the system's libefa, and with it the system's libibverbs and libnl. Loaded together with
    that module, these find their symbols in the wheel's copies: the constructors of the system's
    libnl enter themselves in the lists of the other libnl, and its destructors, which run when the
    process exits, follow a pointer that was never set: SIGSEGV, exit code 139. Loaded first and by
    itself, the system's rdma-core is bound to its own libraries, and exits are as without it.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(_RDMA_CORE)


def crashes_at_exit() -> bool:
    """Return True if UCX was loaded before `load_rdma_core` could prevent the harm, as it is by
    other users of NIXL in this process: the system's libnl does not know of its own caches."""
    try:
        ctypes.CDLL(_LIBNL_ROUTE, mode=os.RTLD_NOLOAD)
        lookup = ctypes.CDLL(_LIBNL, mode=os.RTLD_NOLOAD).nl_cache_ops_lookup
    except (OSError, AttributeError):
        return False
    lookup.restype = ctypes.c_void_p
    return lookup(b"route/link") is None


@functools.cache
def exit_without_destructors() -> None:
    """Have this process end without the destructors of its libraries, its exit code kept.

    `exit` calls C's handlers in the reverse order of their registration, the destructors last.
    So handlers registered from now on run, C's streams are flushed, and then the process is gone;
    handlers that were registered before are skipped. Python's own end comes earlier and is whole.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def new_agent(nixl: Any, engine_config: str) -> tuple[Any, list[int]]:
    """Make an agent under a random name, and its UCX back-end. Raises what `failures` lists."""
    load_rdma_core()
    options = nixl.nixlAgentConfig()
    # No progress threads: they spin.
    options.useProgThread = options.useListenThread = options.captureTelemetry = False
    options.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = nixl.nixlAgent(secrets.token_hex(8), options)
    try:
        backends = [agent.createBackend("UCX", {"engine_config": engine_config})]
    except BaseException:
        del agent  # the traceback keeps this frame, and would keep an agent of no use
        raise
    if crashes_at_exit():
        exit_without_destructors()
    return agent, backends


def confine() -> None:
    """Die with the parent, leave no core, gain no privileges, be traced by no process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in (
        (_PR_SET_PDEATHSIG, signal.SIGKILL),
        (_PR_SET_DUMPABLE, 0),
        (_PR_SET_NO_NEW_PRIVS, 1),
    ):
        if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def map_read_only(descriptor: int, nbytes: int) -> int:
    """Map a memfd for good; returns the address. Closes the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    address = libc.mmap(None, nbytes, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes")
    os.close(descriptor)
    return int(address)


class Agent:
    """The agent and its poller."""

    def __init__(self, nixl: Any, regions: list[tuple[int, int]]) -> None:
        self._agent, self._backends = new_agent(nixl, "")
        self.addresses = [map_read_only(descriptor, nbytes) for descriptor, nbytes in regions]
        if regions:
            # Given a list, the constructor would look for numpy first.
            descs = nixl.nixlRegDList(nixl.DRAM_SEG)
            for address, (_, nbytes) in zip(self.addresses, regions, strict=True):
                descs.addDesc((address, nbytes, 0, ""))
            self._agent.registerMem(descs, self._backends)
        self.metadata: bytes = self._agent.getLocalMD()

    def run(self, control: socket.socket) -> None:
        """Poll until the control socket ends."""
        control.setblocking(False)
        waiting = select.poll()
        waiting.register(control.fileno(), select.POLLIN)
        poll, backends = self._agent.getNotifs, self._backends
        busy, worked_s = False, 0.0
        while True:
            if not busy:
                waiting.poll(IDLE_POLL_S * 1e3)
            try:
                said = control.recv(4096)
                if not said:
                    return
                busy, worked_s = said[-1:] == BUSY, time.perf_counter()
            except BlockingIOError:
                pass
            # What peers send as notifications is dropped.
            if not busy:
                poll({}, backends)
                continue
            began_s = time.perf_counter()
            for _ in range(POLLS):
                poll({}, backends)
            now_s = time.perf_counter()
            if now_s - began_s >= POLLS * NOTHING_S:
                worked_s = now_s
            elif now_s - worked_s < YIELD_S:
                os.sched_yield()
            else:
                time.sleep(pause_s(now_s - worked_s))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    control = socket.socket(fileno=arguments["control"])
    expected: tuple[type[Exception], ...] = (OSError, ImportError)
    try:
        confine()
        nixl = load_bindings(arguments["bindings"])
        expected += failures(nixl)
        agent = Agent(nixl, arguments["regions"])
    except expected as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
        control.sendall(json.dumps(answer).encode() + b"\n")
        return
    ready = {"metadata": agent.metadata.hex(), "addresses": agent.addresses}
    control.sendall(json.dumps(ready).encode() + b"\n")
    agent.run(control)
    # Without destructors: whatever a peer did to this process ends here.
    os._exit(0)


if __name__ == "__main__":
    main()
