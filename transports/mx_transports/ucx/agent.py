"""The program that an exposure of `ucx` runs: one NIXL agent, with no secrets.

UCX in software enforces no bounds: a process that reaches an agent's port can read and write all
of the process that it lives in. So the source's agents live here: a process that maps the sealed
memfds read-only, and has neither keys nor tokens nor sockets of the source. The worst that a forged
peer can do is to end it.

Run by path, isolated and without site-packages; imports nothing but the standard library and
NIXL's extension module, by its path. Its standard input is JSON: `bindings`, the path; `control`, a
socket; `regions`, pairs of descriptor and nbytes; `imports`, memory of the one GPU that the process
sees, as `OnlyGpu.open` takes it. UCX is set up by the environment. The program answers with a line
of JSON on the control socket: `metadata` in hexadecimal and `addresses`, or `error`. Then it
receives there BUSY when reads begin, IDLE when the last one has ended; the program ends with the
socket.

With `reads` it is the agent of a target that reads into a GPU's memory: what UCX does to a process
when a peer ends or a copy fails is done to this one. `ReadingAgent` has its commands.
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
from collections.abc import Iterable
from types import ModuleType
from typing import Any

BUSY, IDLE = b"B", b"I"

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PROT_READ, _MAP_SHARED = 1, 1
#: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, and what cuMemSetAccess and its like take.
_LAZY_PEERS, _POSIX_FD, _ON_DEVICE, _READ, _READ_WRITE = 1, 1, 1, 1, 3
#: What a target's agent has of its own to try a read with.
PROBE_BYTES = 64 << 10
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


def worked(began_s: float, before_s: float) -> float:
    """Return when there was last something to do, after POLLS looks since `began_s`, before which
    it was `before_s`. If they found nothing, this leaves the core to others first."""
    now_s = time.perf_counter()
    if now_s - began_s >= POLLS * NOTHING_S:
        return now_s
    if now_s - before_s < YIELD_S:
        os.sched_yield()
    else:
        time.sleep(pause_s(now_s - before_s))
    return before_s


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _MapAccess(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class OnlyGpu:
    """The one GPU that this process sees, by its driver. Its context is the thread's current one.

    Memory is opened for good: it goes with the process. Every method raises OSError.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxPushCurrent_v2", context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise OSError(code, f"{name}: error {code} of CUDA")

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def open(self, nbytes: int, handle: str, descriptor: int, access: int) -> int:
        """Open another process's allocation.

        Args:
            nbytes: Its size.
            handle: Its legacy IPC handle in hexadecimal; "" if it has a descriptor.
            descriptor: Its descriptor, which is closed here.
            access: What this process may do with memory that has a descriptor.

        Returns:
            Its address here.
        """
        address, allocation = ctypes.c_uint64(), ctypes.c_uint64()
        at, size, none = ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        if handle:
            shared = _IpcHandle.from_buffer_copy(bytes.fromhex(handle))
            self._call("cuIpcOpenMemHandle_v2", at, shared, _LAZY_PEERS)
            return address.value
        fd = ctypes.c_void_p(descriptor)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(allocation), fd, _POSIX_FD)
        os.close(descriptor)
        self._call("cuMemAddressReserve", at, size, none, none, none)
        self._call("cuMemMap", address, size, none, allocation, none)
        allowed = _MapAccess(_ON_DEVICE, 0, access)
        self._call("cuMemSetAccess", address, size, ctypes.byref(allowed), ctypes.c_size_t(1))
        return address.value


def register(nixl: Any, agent: Any, backends: Any, ranges: Iterable[tuple[int, int]]) -> None:
    """Register memory of the GPU with an agent, allocation by allocation."""
    descs = nixl.nixlRegDList(nixl.VRAM_SEG)
    for address, nbytes in ranges:
        descs.addDesc((address, nbytes, 0, ""))
    agent.registerMem(descs, backends)


class Agent:
    """The agent and its poller."""

    def __init__(
        self, nixl: Any, regions: list[tuple[int, int]], imports: list[tuple[int, str, int]]
    ) -> None:
        self._agent, self._backends = new_agent(nixl, "")
        self.addresses = [map_read_only(descriptor, nbytes) for descriptor, nbytes in regions]
        if regions:
            # Given a list, the constructor would look for numpy first.
            descs = nixl.nixlRegDList(nixl.DRAM_SEG)
            for address, (_, nbytes) in zip(self.addresses, regions, strict=True):
                descs.addDesc((address, nbytes, 0, ""))
            self._agent.registerMem(descs, self._backends)
        if imports:
            gpu = OnlyGpu()
            opened = [gpu.open(*each, _READ) for each in imports]
            sizes = [nbytes for nbytes, _, _ in imports]
            register(nixl, self._agent, self._backends, zip(opened, sizes, strict=True))
            self.addresses += opened
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
            worked_s = worked(began_s, worked_s)


def tell(control: socket.socket, answer: object) -> None:
    """Send an answer, a line of JSON."""
    control.sendall(json.dumps(answer).encode() + b"\n")


class ReadingAgent:
    """The agent of a target, which reads into the memory of its GPU.

    Each command is a line of JSON on the control socket, of a name and what it takes: `connect`,
    the source's metadata; `open`, an allocation as `OnlyGpu.open` has it but for the descriptor,
    which comes with the line; `read`, a number, and the address here, the address there and the
    bytes of each range. An answer is its name and a value: null, the address and, once a read has
    ended, its number. What fails is answered by `error`, and ends the program.
    """

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._gpu = OnlyGpu()
        self._agent, self._backends = new_agent(nixl, "")
        self.addresses = [self._gpu.allocate(PROBE_BYTES)]
        self._register(self.addresses[0], PROBE_BYTES)
        self.metadata: bytes = self._agent.getLocalMD()
        self._remote = ""
        self._handles: dict[int, int] = {}

    def _register(self, address: int, nbytes: int) -> None:
        register(self._nixl, self._agent, self._backends, [(address, nbytes)])

    def run(self, control: socket.socket) -> None:
        """Obey until the control socket ends."""
        received, descriptors, worked_s = bytearray(), list[int](), 0.0
        waiting = select.poll()
        waiting.register(control.fileno(), select.POLLIN)
        while True:
            if not waiting.poll(0 if self._handles else None):
                began_s = time.perf_counter()
                for number in [number for _ in range(POLLS) for number in self._ended()]:
                    tell(control, ("read", number))
                worked_s = worked(began_s, worked_s)
                continue
            data, found, _, _ = socket.recv_fds(control, 1 << 16, 16)
            if not data:
                return
            received += data
            descriptors += found
            while b"\n" in received:
                line, _, received = received.partition(b"\n")
                name, *arguments = json.loads(line)
                worked_s = time.perf_counter()
                answer = getattr(self, f"_{name}")(*arguments, descriptors)
                if name != "read":
                    tell(control, (name, answer))

    def _ended(self) -> list[int]:
        """Let UCX work, and return the numbers of reads that have ended."""
        done = self._nixl.NIXL_SUCCESS
        ended = [
            n for n, handle in self._handles.items() if self._agent.getXferStatus(handle) == done
        ]
        for number in ended:
            self._agent.releaseXferReq(self._handles.pop(number))
        return ended

    def _connect(self, metadata: str, descriptors: list[int]) -> None:
        del descriptors
        self._remote = self._agent.loadRemoteMD(bytes.fromhex(metadata)).decode()

    def _open(self, nbytes: int, handle: str, descriptors: list[int]) -> int:
        descriptor = -1 if handle else descriptors.pop(0)
        address = self._gpu.open(nbytes, handle, descriptor, _READ_WRITE)
        self._register(address, nbytes)
        return address

    def _read(
        self, number: int, ranges: list[tuple[int, int, int]], descriptors: list[int]
    ) -> None:
        del descriptors
        here, there = (self._nixl.nixlXferDList(self._nixl.VRAM_SEG) for _ in range(2))
        for local, remote, nbytes in ranges:
            here.addDesc((local, nbytes, 0))
            there.addDesc((remote, nbytes, 0))
        reads = self._nixl.NIXL_READ
        handle = self._agent.createXferReq(reads, here, there, self._remote)
        self._agent.postXferReq(handle)
        self._handles[number] = handle


def main() -> None:
    arguments = json.load(sys.stdin.buffer)
    # What opens a GPU's memory is not left behind in /proc either.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    control = socket.socket(fileno=arguments["control"])
    expected: tuple[type[Exception], ...] = (OSError, ImportError)
    try:
        confine()
        nixl = load_bindings(arguments["bindings"])
        expected += failures(nixl)
        agent: Agent | ReadingAgent
        if arguments["reads"]:
            agent = ReadingAgent(nixl)
        else:
            agent = Agent(nixl, arguments["regions"], arguments["imports"])
        ready = {"metadata": agent.metadata.hex(), "addresses": agent.addresses}
        tell(control, ready)
        agent.run(control)
    except expected as error:
        with contextlib.suppress(OSError):
            tell(control, {"error": f"{type(error).__name__}: {error}"})
    # Without destructors: whatever a peer did to this process ends here.
    os._exit(0)


if __name__ == "__main__":
    main()
