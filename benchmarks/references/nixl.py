"""Measures bare NIXL: one agent on each side, reads of one size, several under way.

Each MiB is hashed with blake3 when its read is done. The server is a process of its own that only
polls. The settings are the transport's: TCP without shared memory, 256 KiB segments, no progress
threads. There is no control connection, no grant, and no verification beyond the hash.
"""

from __future__ import annotations

import base64
import collections
import ctypes
import importlib
import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from blake3 import blake3

from mx_transports.ucx.agent import load_rdma_core

_MIB = 1 << 20
_HUGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_CONFIG = "TLS=^sm,NET_DEVICES=lo,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k,PROTOS=?e*"


def _agent() -> tuple[Any, Any, list[int]]:
    """Return the bindings, an agent, and its back-end."""
    for package in ("nixl_cu12", "nixl_cu13"):
        try:
            nixl = importlib.import_module(f"{package}._bindings")
            break
        except ModuleNotFoundError:
            continue
    load_rdma_core()  # without it this process dies at exit where rdma-core is installed
    options = nixl.nixlAgentConfig()
    options.useProgThread = options.useListenThread = options.captureTelemetry = False
    options.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = nixl.nixlAgent(secrets.token_hex(8), options)
    return nixl, agent, [agent.createBackend("UCX", {"engine_config": _CONFIG})]


def _server(memfd: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, memfd, 0)
    nixl, agent, backends = _agent()
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, nbytes, 0, "")]), backends)
    metadata = base64.b64encode(agent.getLocalMD()).decode()
    print(json.dumps([address, metadata]), flush=True)
    while os.getppid() != 1:
        for _ in range(10_000):
            agent.getNotifs({}, backends)


class BareNixl:
    """A server process over `memfd`; `receive` is one timed transfer."""

    def __init__(self, memfd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(Path(__file__).resolve()), str(memfd), str(nbytes)],
            pass_fds=[memfd],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._address, metadata = json.loads(self._process.stdout.readline())
        self._metadata = base64.b64decode(metadata)
        self._process.send_signal(signal.SIGSTOP)

    def receive(
        self,
        read_nbytes: int,
        under_way: int,
        *,
        populate: bool = False,
        into: memoryview | None = None,
    ) -> float:
        """Return the seconds to make an agent and a fresh destination, read and hash.

        Args:
            read_nbytes: The size of a read.
            under_way: Reads at a time.
            populate: Fault the destination in before the first read.
            into: The destination, in place of a fresh one.
        """
        # The server spins: stopped in between, it takes no core from the next contestant.
        self._process.send_signal(signal.SIGCONT)
        try:
            if into is not None:
                return self._receive(read_nbytes, under_way, into)
            start_s = time.perf_counter()
            room = mmap.mmap(-1, self.nbytes + _HUGE, flags=mmap.MAP_PRIVATE)
            room.madvise(mmap.MADV_HUGEPAGE)
            if populate:
                room.madvise(_MADV_POPULATE_WRITE)
            made_s = time.perf_counter() - start_s
            return made_s + self._receive(read_nbytes, under_way, memoryview(room))
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def _receive(self, read_nbytes: int, under_way: int, view: memoryview) -> float:
        start_s = time.perf_counter()
        here = ctypes.addressof(ctypes.c_char.from_buffer(view))
        nixl, agent, backends = _agent()
        descs = nixl.nixlRegDList(nixl.DRAM_SEG, [(here, self.nbytes, 0, "")])
        agent.registerMem(descs, backends)
        server = agent.loadRemoteMD(self._metadata).decode()
        waiting: collections.deque[tuple[int, int, int]] = collections.deque()
        posted = 0
        while posted < self.nbytes or waiting:
            while posted < self.nbytes and len(waiting) < under_way:
                take = min(read_nbytes, self.nbytes - posted)
                handle = agent.createXferReq(
                    nixl.NIXL_READ,
                    nixl.nixlXferDList(nixl.DRAM_SEG, [(here + posted, take, 0)]),
                    nixl.nixlXferDList(nixl.DRAM_SEG, [(self._address + posted, take, 0)]),
                    server,
                )
                agent.postXferReq(handle)
                waiting.append((handle, posted, posted + take))
                posted += take
            handle, start, end = waiting[0]
            if agent.getXferStatus(handle) == nixl.NIXL_SUCCESS:
                waiting.popleft()
                agent.releaseXferReq(handle)
                for at in range(start, end, _MIB):
                    blake3(view[at : min(at + _MIB, end)]).digest()
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


_MAIN = """
import runpy, sys
runpy.run_path(sys.argv[1])["_server"](int(sys.argv[2]), int(sys.argv[3]))
"""
