"""The parent's control of an agent's process: started, watched, commanded, ended.

One thread per process does all of it. That thread starts the process, as the kernel ties "die
with your parent" to the thread that forked, and lives until the process has been reaped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mx import forks
from mx.errors import MxError
from mx_transports.toolkit.stream import SocketStream
from mx_transports.ucx import agent as agent_program
from mx_transports.ucx.agent import BUSY, IDLE

#: Registering memory with an RDMA device locks it page by page; sockets take 0.1 s to start.
START_TIMEOUT_S = 60.0
_TICK_S = 1.0
_MAX_ANSWER_BYTES = 1 << 20


#: An allocation for `agent.OnlyGpu.open`: its size, its handle, its descriptor, -1 for none.
GpuImport = tuple[int, str, int]


class AgentProcess:
    """`imports` returns the GPU's memory that the agent has, with new descriptors, which are closed
    here; it raises OSError or MxError. `on_end` is called from the thread once the process is gone,
    `linger_s` after the last user has left, or before. `error` then says why, unless `stop` was
    called."""

    #: Whether it reads, or is read from.
    reads = False

    def __init__(
        self,
        bindings: str,
        regions: Sequence[tuple[int, int]],
        environment: Mapping[str, str],
        linger_s: float,
        on_end: Callable[[AgentProcess], None],
        imports: Callable[[], list[GpuImport]] = list,
    ) -> None:
        self._bindings = bindings
        self._regions = list(regions)
        self._environment = dict(environment)
        self._linger_s = linger_s
        self._on_end = on_end
        self._imports = imports
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._stopping = False
        self._users: set[SocketStream] = set()
        self._reads = 0
        self._unused_since_s = time.monotonic()
        #: Set when the process is ready, or will never be.
        self.settled = threading.Event()
        self.pid = 0
        self.metadata = b""
        self.addresses: list[int] = []
        self.error = ""
        self.ended = False
        self.thread = threading.Thread(target=self._main, name="mx-ucx-agent", daemon=True)

    # --- for the exposure

    @property
    def stopping(self) -> bool:
        return self._stopping

    def enter(self, stream: SocketStream) -> bool:
        """Count a reader's connection, which is cut when the process is gone. Return False if the
        process is being ended: the reader needs another process."""
        with self._lock:
            if self._stopping:
                return False
            self._users.add(stream)
            return True

    def leave(self, stream: SocketStream) -> None:
        """Remove a reader's connection; called before it is closed."""
        with self._lock:
            self._users.discard(stream)
            self._unused_since_s = time.monotonic()

    @property
    def used(self) -> bool:
        return bool(self._users)

    def count_reads(self, change: int) -> None:
        """Reads have begun or ended: the agent polls while there are any."""
        with self._lock:
            before, self._reads = self._reads, self._reads + change
            if bool(before) != bool(self._reads) and self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.send(BUSY if self._reads else IDLE)

    def stop(self) -> None:
        """End it soon. Idempotent."""
        with self._lock:
            self._stopping = True
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_RDWR)

    # --- the thread

    def _main(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            forks.own(ours)  # its end ends the agent
            with theirs:
                process = self._start(theirs)
            self.pid = process.pid
            with self._lock:
                self._control = ours
                if self._stopping:
                    return
            self._converse(ours)
        except (OSError, MxError) as error:
            why = error.message if isinstance(error, MxError) else error.strerror
            self.error = f"it could not be started: {why or error}"
        finally:
            with self._lock:
                self._control = None
                if self._stopping:
                    self.error = ""
            if process is not None:
                # There is nothing in it worth an orderly end.
                process.kill()
                process.wait()
            if ours is not None:
                ours.close()
            with self._lock:
                self.ended = True
                # Readers that still wait for its start are sent the reason instead.
                for stream in self._users if self.metadata else ():
                    stream.abort()
            self.settled.set()
            self._on_end(self)

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        imports = self._imports()
        arguments = {
            "bindings": self._bindings,
            "control": theirs.fileno(),
            "regions": self._regions,
            "imports": imports,
            "reads": self.reads,
        }
        passed = [fd for _, _, fd in imports if fd >= 0]
        try:
            # All users can read a process's arguments, and handles open a GPU's memory.
            with open(os.memfd_create("mx-agent"), "w+b") as said:
                said.write(json.dumps(arguments).encode())
                said.seek(0)
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", agent_program.__file__],
                    stdin=said,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environment,
                    cwd="/",
                    close_fds=True,
                    pass_fds=[theirs.fileno(), *(fd for fd, _ in self._regions), *passed],
                )
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def _converse(self, ours: socket.socket) -> None:
        if not self._hear_answer(ours):
            return
        ours.settimeout(_TICK_S)
        while True:
            try:
                if not ours.recv(1):
                    self.error = "it ended unexpectedly"
                    return
            except TimeoutError:
                with self._lock:
                    unused_s = time.monotonic() - self._unused_since_s
                    if not self._users and unused_s > self._linger_s:
                        self._stopping = True
                        return

    def _hear_answer(self, ours: socket.socket) -> bool:
        ours.settimeout(START_TIMEOUT_S)
        said = b""
        try:
            while not said.endswith(b"\n") and len(said) < _MAX_ANSWER_BYTES:
                part = ours.recv(1 << 16)
                if not part:
                    self.error = "it ended while it started"
                    return False
                said += part
            answer = json.loads(said)
            if "error" in answer:
                self.error = str(answer["error"])
                return False
            self.metadata, self.addresses = bytes.fromhex(answer["metadata"]), answer["addresses"]
        except TimeoutError:
            self.error = f"it was not ready within {START_TIMEOUT_S:g} s"
            return False
        except (ValueError, KeyError, TypeError):
            self.error = "what it answered can't be read"
            return False
        with self._lock:
            if self._reads:
                ours.send(BUSY)
        self.settled.set()
        return True
