"""NIXL as the target side uses it: found and loaded once, its exceptions translated.

Only this module calls NIXL; it raises MxError only. The extension module is used directly: NIXL's
Python on top of it adds conveniences that are not needed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mx import config
from mx.errors import PathError, PeerLostError, SourceError
from mx.forks import no_fork
from mx_transports.ucx import agent as agent_program

#: The first that is there is used, but one that the process has loaded already comes before it:
#: types of two copies would collide.
PACKAGES = ("nixl_cu12", "nixl_cu13")
LOOPBACK_DEVICE = "lo"

#: What UCX and NIXL take from the environment alone, at the moment they are loaded: they log to
#: standard output otherwise, catch SIGSEGV in place of faulthandler, and start a thread for a
#: virtual file system. With its modules for CUDA (`gda` and `gdp`, of mlx5, load the one named
#: `cuda`), UCX 1.23 calls cuInit in processes that use no GPU, and in others it allocates on the
#: GPU, which ends captures of graphs; here it moves host memory only. UCX also replaces the code of
#: libc's mmap and its like, to be told of memory that is freed, and waits 10 ms for each function:
#: 0.4 s. Here memory is registered and deregistered by calls alone. The modules for RDMA are of use
#: only where the kernel has devices.
LIBRARY_SETTINGS = {
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "UCX_MODULES": "^cuda,gda,gdp" + ("" if os.path.exists("/sys/class/infiniband") else ",ib"),
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_VFS_ENABLE": "n",
    "NIXL_LOG_LEVEL": "FATAL",
}
#: Everything but shared memory: CMA would work only where the `shm` transport does, which checks
#: which process it reads from; and it takes processes of two network namespaces for local ones.
#: 256 KiB segments: five times the bandwidth of UCX's own 8 KiB over tcp (0.5
#: against 0.1 of memcpy). Of UCX's protocols the `get` ones, which read, and `reconfig`: for each
#: protocol and each operation it asks the system about its interfaces, which took 9 of the 13 ms of
#: an agent, and 16 ms on either side once a reader had connected.
UCX_SETTINGS = {
    "TLS": "^sm",
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    "PROTOS": "?e*",
}

#: Beside those, of agents in processes of their own that have memory of a GPU: with UCX's modules
#: for CUDA; without `cuda_ipc`, which exports memory again that is another process's; and with no
#: cache of what is device memory, which sees all of it only where CUDA's runtime is loaded, too.
GPU_SETTINGS = {"MODULES": "all", "TLS": "^sm,cuda_ipc", "MEMTYPE_CACHE": "n"}
#: What agents in processes of their own inherit.
INHERITED = ["UCX_", "NIXL_", "LD_LIBRARY_PATH"]

#: Between two looks at everything else: one of UCX's own turns is done in about 50 us.
POLL_S = 1e-3

_loaded = False


class NixlPackage(NamedTuple):
    package: str
    version: str
    bindings: str  # the path of the extension module


@functools.cache
def find() -> NixlPackage | None:
    """Return the copy of NIXL to use, None if there is none, without importing any of it."""
    loaded = [package for package in PACKAGES if package in sys.modules]
    for package in (*loaded, *PACKAGES):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for suffix in importlib.machinery.EXTENSION_SUFFIXES:
                path = Path(folder, f"_bindings{suffix}")
                if path.is_file():
                    return NixlPackage(package, _version(Path(folder)), str(path))
    return None


def _version(folder: Path) -> str:
    # `importlib.metadata` says the same, but takes 12 ms to import.
    for each in folder.parent.glob(f"{folder.name}-*.dist-info"):
        return each.stem.partition("-")[2]
    return "of unknown version"


def _bindings(peer: str) -> ModuleType:
    found = find()
    if found is None:
        raise PathError(f"{peer} can't be reached by ucx: NIXL is not installed", peer=peer)
    name = f"{found.package}._bindings"
    try:
        if found.package in sys.modules:
            return importlib.import_module(name)
        with no_fork:
            if name in sys.modules:
                return sys.modules[name]
            with config.library_environment(LIBRARY_SETTINGS):  # NIXL's is read as it is loaded
                # Linking sixty libraries takes a while: here without the interpreter lock.
                ctypes.CDLL(None).dlopen(os.fsencode(found.bindings), os.RTLD_NOW)
                sys.modules[name] = agent_program.load_bindings(found.bindings)
            return sys.modules[name]
    except (ImportError, OSError) as error:
        raise PathError(
            f"{peer} can't be reached by ucx: {found.package} does not load: {error}", peer=peer
        ) from error


def engine_config(device: str) -> str:
    """Return UCX's settings as NIXL takes them. Values can't hold commas, so `device` is one at
    most ("" for all there are)."""
    settings = UCX_SETTINGS | ({"NET_DEVICES": device} if device else {})
    return ",".join(f"{name}={value}" for name, value in settings.items())


def agent_environment(devices: Sequence[str], gpu: str = "") -> dict[str, str]:
    """Return all that an agent's process gets of an environment: settings of UCX and CUDA.

    Args:
        devices: UCX's names of the devices to use; empty for all there are.
        gpu: The UUID of the GPU whose memory the agent has, "" for none: then the GPUs' driver has
            no part in it.
    """
    settings = UCX_SETTINGS | ({"NET_DEVICES": ",".join(devices)} if devices else {})
    ours = {
        f"UCX_{name}": value for name, value in (settings | (GPU_SETTINGS if gpu else {})).items()
    }
    ours["CUDA_VISIBLE_DEVICES"] = gpu
    return {**LIBRARY_SETTINGS, **ours, **config.inherited(*INHERITED)}


def memlock_hint() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"RDMA locks memory and the limit is {soft} bytes: try `ulimit -l unlimited`"


@contextlib.contextmanager
def _library_loaded() -> Iterator[None]:
    """The process's first agent loads UCX, with its settings; later ones leave them alone. No fork
    happens meanwhile: each agent takes locks of UCX that are the process's."""
    global _loaded
    with no_fork:
        with config.library_environment({} if _loaded else LIBRARY_SETTINGS):
            yield
        _loaded = True


def load(peer: str) -> None:
    """Have UCX loaded, which takes 0.1 s the first time. Raises PathError."""
    with no_fork:
        if not _loaded:
            TargetAgent(peer, LOOPBACK_DEVICE).close()  # of all devices it takes longer


class AddressRange(NamedTuple):
    """Bytes at an address of this process or of the peer's."""

    address: int
    nbytes: int


class Pin:
    """A writable view's address; the buffer stays where it is while this lives."""

    def __init__(self, view: memoryview) -> None:
        self._hold = ctypes.c_char.from_buffer(view)
        self.range = AddressRange(ctypes.addressof(self._hold), len(view))


class TargetAgent:
    """An agent that reads from one peer. Not thread-safe; not in need of any other thread.

    Every method raises PathError or PeerLostError, `peer` named. Once `close` has returned True
    nothing is written to registered memory any more, whatever was in flight.

    NIXL has no call that ends an agent: it ends with the last reference to it. So there is one
    reference, here. Methods take it for the length of one call and keep neither the agent nor
    one of its methods in a variable: a traceback would keep that, and with it the agent.
    """

    def __init__(self, peer: str, device: str) -> None:
        self._peer = peer
        self._remote = ""
        self._worked_s = 0.0  # when UCX last had anything to do
        nixl: Any = _bindings(peer)
        self._nixl = nixl
        self._success = nixl.NIXL_SUCCESS
        self._failures = agent_program.failures(nixl)
        self._agent: Any = None
        self._alive: Callable[[], object | None] = lambda: None
        with self._edge(f"a UCX agent on {device or 'any device'}"), _library_loaded():
            self._agent, self._backends = agent_program.new_agent(nixl, engine_config(device))
        self._alive = weakref.ref(self._agent)

    @contextlib.contextmanager
    def _edge(self, what: str, hint: str = "") -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            raise self._translate(error, what, hint) from error

    def _translate(self, error: Exception, what: str, hint: str = "") -> SourceError:
        text = f"{self._peer} by ucx: {what}: {str(error) or type(error).__name__}"
        gone = (self._nixl.nixlRemoteDisconnectError, self._nixl.nixlCancelledError)
        if isinstance(error, gone):
            return PeerLostError(text, peer=self._peer)
        return PathError(text, peer=self._peer, hint=hint)

    def connect(self, metadata: bytes) -> None:
        """Take metadata as that of the peer. It is NIXL that parses it."""
        with self._edge("its metadata is refused"):
            self._remote = self._agent.loadRemoteMD(metadata).decode()

    def register(self, memory: AddressRange) -> Any:
        """Allow reads into a range of this process's memory; the answer is for `deregister`."""
        with self._edge(f"registering {memory.nbytes} bytes", memlock_hint()):
            descs = self._nixl.nixlRegDList(self._nixl.DRAM_SEG)
            descs.addDesc((*memory, 0, ""))
            self._agent.registerMem(descs, self._backends)
            return descs

    def deregister(self, descs: Any) -> None:
        with self._edge("deregistering"):
            self._agent.deregisterMem(descs, self._backends)

    def post(self, local: Sequence[AddressRange], remote: Sequence[AddressRange]) -> int:
        """Begin to read remote ranges into local ones of the same sizes; returns a handle."""
        with self._edge("a read"):
            handle: int = self._agent.createXferReq(
                self._nixl.NIXL_READ, self._list(local), self._list(remote), self._remote
            )
            self._agent.postXferReq(handle)
            self._worked_s = time.perf_counter()
            return handle

    def _list(self, ranges: Sequence[AddressRange]) -> Any:
        descs = self._nixl.nixlXferDList(self._nixl.DRAM_SEG)  # given a list it imports numpy
        for each in ranges:
            descs.addDesc((*each, 0))
        return descs

    def poll(self, handle: int) -> bool:
        """Let UCX work while there is anything to do or may soon be, for POLL_S at most.

        Returns:
            True once the read has ended; its handle is invalid then.
        """
        success, clock = self._success, time.perf_counter
        began_s = before_s = clock()
        try:
            polls = 0
            while self._agent.getXferStatus(handle) != success:
                polls += 1
                if polls % agent_program.POLLS:
                    continue
                now_s = clock()
                if now_s - before_s >= agent_program.POLLS * agent_program.NOTHING_S:
                    self._worked_s = now_s
                elif now_s - self._worked_s > agent_program.YIELD_S:
                    return False
                else:
                    os.sched_yield()
                if now_s - began_s > POLL_S:
                    return False
                before_s = clock()
            self._worked_s = clock()
            self._agent.releaseXferReq(handle)
            return True
        except self._failures as error:
            raise self._translate(error, "a read failed") from error

    def pause(self) -> None:
        """Pause after a look that found nothing to do: the socket's buffer goes on filling."""
        nothing_s = time.perf_counter() - self._worked_s
        if nothing_s > agent_program.YIELD_S:
            time.sleep(agent_program.pause_s(nothing_s))

    def close(self) -> bool:
        """Destroy the agent: connections, registrations, and transfers in flight.

        Returns:
            True once it is destroyed. False while something else still refers to it, and it may
            write to memory: to be called again.
        """
        with no_fork:
            self._agent = None
        return self._alive() is None
