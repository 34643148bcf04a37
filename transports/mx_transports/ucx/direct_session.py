"""The target side of GPUDirect: reads from a GPU's memory into that of another one.

UCX aborts the process whose copy fails, and with its modules for CUDA it calls the driver as an
engine does not expect. So the target's agent is in a process of its own here, which imports the
memory that it is to write to. It is killed and waited for before a read is failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from mx.errors import (
    LocalError,
    MxError,
    PathError,
    PathSlowError,
    PeerProtocolError,
    PeerTimeoutError,
    SourceError,
)
from mx.transport import DeviceView, Grant, Read, Span
from mx_transports.toolkit.slicing import Slice
from mx_transports.toolkit.stream import SocketStream
from mx_transports.ucx import nixl
from mx_transports.ucx.agent import PROBE_BYTES
from mx_transports.ucx.agent_process import START_TIMEOUT_S, AgentProcess
from mx_transports.ucx.gpu_memory import GpuImports
from mx_transports.ucx.nixl import AddressRange
from mx_transports.ucx.session import Flight, UcxSession
from mx_transports.ucx.wire import DIRECT, REQUEST, AgentInfo, GpuPlace

log = logging.getLogger("mx.transports.ucx")

#: How long a session waits for the end of a read before it looks at its connection again.
_PAUSE_S = 0.005
#: How long a process that was killed may take to go before that is worth a word.
_END_S = 5.0
#: A process that takes no commands for so long does not work.
_SEND_S = 5


class UndirectedError(PathError, PathSlowError):
    """The GPU's memory can't be read directly any more. The path works, through slots: it is used
    again where nothing else is left."""


class ReadingProcess(AgentProcess):
    """The process of a target's agent, which obeys the commands of `agent.ReadingAgent`."""

    reads = True

    def __init__(self, bindings: str, environment: dict[str, str]) -> None:
        super().__init__(bindings, [], environment, 0.0, lambda _: None)
        self._heard = threading.Condition()
        self._answers: list[tuple[str, Any]] = []

    def tell(self, *command: object, descriptor: int = -1) -> None:
        """Send a command. Raises OSError: the process has ended."""
        with self._lock:
            if self._control is None:
                raise BrokenPipeError
            data = json.dumps(command).encode() + b"\n"
            passed = [descriptor] if descriptor >= 0 else []
            sent = socket.send_fds(self._control, [data], passed)
            self._control.sendall(data[sent:])

    def hear(self, wait_s: float) -> list[tuple[str, Any]]:
        """Return the answers that have come, after a wait if there are none."""
        with self._heard:
            self._heard.wait_for(lambda: self._answers or self.ended, wait_s)
            answers, self._answers = self._answers, []
            return answers

    # --- the thread

    def _converse(self, ours: socket.socket) -> None:
        if not self._hear_answer(ours):
            return
        ours.settimeout(None)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        # Where the process is killed, what it was told and has not read resets the connection.
        with contextlib.suppress(ConnectionError), ours.makefile("rb") as lines:
            for line in lines:
                answer = json.loads(line)
                if isinstance(answer, dict):
                    self.error = str(answer["error"])
                    return
                name, value = answer
                with self._heard:
                    self._answers.append((name, value))
                    self._heard.notify()
        self.error = "it ended unexpectedly"


class ConfinedAgent:
    """As `mx_transports.ucx.nixl.TargetAgent`, for memory of a GPU, in a process of its own.

    Used by one thread at a time. Every method raises UndirectedError, `peer` named.

    Args:
        grant: What it reads by.
        bindings: The path of NIXL's extension module.
        device: UCX's name of the device that it uses, "" for any.
    """

    def __init__(self, grant: Grant, bindings: str, device: str) -> None:
        self._peer, self._patience_s = grant.peer, grant.stall_timeout_s
        self._cancelled = grant.cancelled
        self._gpu = grant.device.removeprefix("cuda:")
        environment = nixl.agent_environment([device] if device else [], self._gpu)
        self._process = ReadingProcess(bindings, environment)
        self._memories: list[tuple[GpuImports, list[int]]] = []
        self._numbers = itertools.count()
        self._done: set[int] = set()
        self._answers: list[Any] = []
        try:
            self._process.thread.start()
        except RuntimeError as error:
            raise self._error(str(error)) from error

    def _error(self, why: str) -> UndirectedError:
        return UndirectedError(f"{self._peer} by ucx, GPUDirect: {why}", peer=self._peer)

    def _tell(self, *command: object, descriptor: int = -1) -> None:
        try:
            self._process.tell(*command, descriptor=descriptor)
        except OSError as error:
            self._process.thread.join(_END_S)
            raise self._error(self._process.error or "its process has ended") from error

    def _hear(self, wait_s: float = 0.0) -> None:
        for name, value in self._process.hear(wait_s):
            if name == "read":
                self._done.add(value)
            else:
                self._answers.append(value)
        if self._process.ended and not self._answers:
            raise self._error(self._process.error or "its process has ended")

    def _wait(self, is_over: Callable[[], object], patience_s: float) -> None:
        until_s = time.monotonic() + patience_s
        while not is_over():
            self._hear(_PAUSE_S)
            if self._cancelled.is_set or time.monotonic() > until_s:
                raise self._error(f"nothing has come for {patience_s:g} s")

    def _ask(self, *command: object, descriptor: int = -1) -> Any:
        self._tell(*command, descriptor=descriptor)
        self._wait(lambda: self._answers, self._patience_s)
        return self._answers.pop()

    def connect(self, info: AgentInfo) -> None:
        """Connect to the source's agent, and try a read from its memory."""
        self._wait(self._process.settled.is_set, START_TIMEOUT_S)
        self._ask("connect", info.metadata.hex())
        for place in info.places[:1]:
            nbytes = min(place.nbytes, PROBE_BYTES)
            here = AddressRange(self._process.addresses[0], nbytes)
            number = self.post([here], [AddressRange(place.address, nbytes)])
            self._wait(partial(self.poll, number), self._patience_s)

    def here(self, span: DeviceView) -> list[AddressRange]:
        """Return where memory of this process is in the agent's, which imports it if need be."""
        for memory, addresses in self._memories:
            parts = [
                AddressRange(addresses[number] + offset, nbytes)
                for number, offset, nbytes in memory.parts(span.address, len(span))
            ]
            if sum(part.nbytes for part in parts) == len(span):
                return parts
        self._import(span)
        return self.here(span)

    def _import(self, span: DeviceView) -> None:
        try:
            memory = GpuImports([span])
            # Kept at once: until the process is gone it may have opened what it was given.
            self._memories.append((memory, []))
            new = memory.new()
        except MxError as error:
            raise self._error(error.message) from error
        try:
            if memory.gpu != self._gpu:
                raise self._error(f"memory on {memory.gpu} is not on {self._gpu}")
            found = [self._ask("open", n, handle, descriptor=fd) for n, handle, fd in new]
        finally:
            for _, _, descriptor in new:
                if descriptor >= 0:
                    os.close(descriptor)
        self._memories[-1] = memory, found

    def post(self, local: Sequence[AddressRange], remote: Sequence[AddressRange]) -> int:
        """Begin to read remote ranges into local ones of the same sizes; returns a handle."""
        number = next(self._numbers)
        ranges = [(here.address, *there) for here, there in zip(local, remote, strict=True)]
        self._tell("read", number, ranges)
        return number

    def poll(self, handle: int) -> bool:
        """Return True once the read has ended; its handle is invalid then."""
        self._hear()
        ended = handle in self._done
        self._done.discard(handle)
        return ended

    def pause(self) -> None:
        """Wait a moment for a read to end."""
        self._hear(_PAUSE_S)

    def close(self) -> bool:
        """End the process. Return True once it is gone: nothing writes to the memory any more."""
        self._process.stop()
        self._process.thread.join(_END_S)
        if self._process.thread.is_alive():
            return False
        while self._memories:
            self._memories.pop()[0].close()
        return True


def device_view(span: Span) -> DeviceView:
    """Return a destination in a GPU's memory. Raises LocalError for one in the host's."""
    if isinstance(span, memoryview):
        raise LocalError("a read into a GPU's memory ends in the host's")
    return span


class DirectSession(UcxSession):
    """A session that fills a GPU's memory from another one's.

    Args:
        grant: What it was opened with.
        stream: The connection to the source.
        agent: Is connected, and owned by the session.
        info: The source's regions, and the `places` that they lie in.
        on_failure: Is called if memory can't be read directly any more.
    """

    #: See `mx.transport.Grant.device`.
    fills_device = True
    detail = "GPUDirect"
    as_view = staticmethod(device_view)

    def __init__(
        self,
        grant: Grant,
        stream: SocketStream,
        agent: ConfinedAgent,
        info: AgentInfo,
        on_failure: Callable[[], None],
    ) -> None:
        self._places = info.places
        self._confined = agent
        self._on_failure = on_failure
        self._why: UndirectedError | None = None
        super().__init__(grant, stream, cast("nixl.TargetAgent", agent), info)

    def adopt(self, arena: Span) -> None:
        """Do nothing: memory is registered, by allocation, when a read first ends there."""
        del arena

    def turn(self) -> None:
        try:
            super().turn()
        except (UndirectedError, PeerTimeoutError) as error:
            self._on_failure()
            self._why = UndirectedError(error.message, peer=self.peer)
            raise self._why from error

    def fail(self, read: Read, error: MxError) -> None:
        # Reads that have not begun, too: the path is of use.
        super().fail(read, error if self.closed else self._why or error)

    def ranges(
        self, flight: Flight, parts: Sequence[Slice[Any]]
    ) -> tuple[list[AddressRange], list[AddressRange]]:
        del flight
        local: list[AddressRange] = []
        remote: list[AddressRange] = []
        for part in parts:
            offset = part.offset
            for address, nbytes in self._confined.here(part.view):
                while nbytes:
                    there = self._there(part.region, offset, nbytes)
                    local.append(AddressRange(address, there.nbytes))
                    remote.append(there)
                    address, nbytes = address + there.nbytes, nbytes - there.nbytes
                    offset += there.nbytes
        return local, remote

    def _there(self, region: int, offset: int, nbytes: int) -> AddressRange:
        """Return where the source's agent has the first of some bytes, as many as are together."""
        number = bisect_right(self._places, (region, offset, math.inf)) - 1
        place = self._places[number] if number >= 0 else GpuPlace(-1, 0, 0, 0)
        inside = offset - place.offset
        if place.region != region or inside >= place.nbytes:
            raise PeerProtocolError(
                f"{self.peer}: its agent has nothing at {offset} of region {region}", peer=self.peer
            )
        return AddressRange(place.address + inside, min(nbytes, place.nbytes - inside))


def open_direct(
    grant: Grant,
    stream: SocketStream,
    info: AgentInfo,
    device: str,
    receive_info: Callable[[SocketStream, str], AgentInfo],
    on_failure: Callable[[], None],
) -> tuple[ConfinedAgent, AgentInfo] | None:
    """Ask the source for an agent that has its GPU's memory, and try a read from there.

    Args:
        grant: What the session is opened with.
        stream: The connection to the source, which has sent `info`.
        info: Says that such an agent may be asked for.
        device: UCX's name of the device that this side uses.
        receive_info: Receives what the source says of an agent.
        on_failure: Is called if it is of no use to try again.

    Returns:
        This side's agent, connected, and the source's; None if its memory can't be read so, or is
        not to be written to: then it comes through slots.

    Raises:
        OSError: The connection has ended.
    """
    found = nixl.find()
    assert found is not None
    given = False
    agent: ConfinedAgent | None = None
    try:
        agent = ConfinedAgent(grant, found.bindings, device)
        stream.send_all([REQUEST.pack(DIRECT, 0, grant.generation, 0)])
        theirs = receive_info(stream, grant.peer)
        given = True
        agent.connect(theirs)
        return agent, replace(info, slot_bytes=0, places=theirs.places)
    except BaseException as error:
        if agent is not None:
            agent.close()
        if not isinstance(error, SourceError):
            raise
        log.info("%s goes through slots of pinned memory: %s", grant.peer, error)
        if given:
            on_failure()
            stream.send_all([REQUEST.pack(DIRECT, 0, grant.generation, 0)])
        return None
