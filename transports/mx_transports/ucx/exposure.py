"""The source side of ucx: sockets for control connections, and an agent's process per NIC.

What is enforced, and what is not. Opening is: without a standing grant's secret no reader
gets an agent's metadata. The source's process is out of reach: the agents live in processes of
their own. Its bytes are: these map sealed memfds, read-only, or the slots that a GPU's memory goes
through (`mx_transports.ucx.slots`). But UCX in software knows no grants: a
process that has had the metadata, or guesses at it, can read the exposed regions for as long as
that agent's process lives, and can end it. So it ends when a grant is withdrawn from a connected
reader with no other there, some time after the last reader has left, and with the exposure; what
honest readers read is void the moment that the grant or the generation is.

A GPU's memory may be read by RDMA, too: through an agent that has it itself, for one reader, with
whose connection it ends (`mx_transports.ucx.direct`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mx.errors import LocalError, MxError, NotAllowedError
from mx.transport import ExposedRegion, ExposeOptions
from mx_transports.toolkit import kernel
from mx_transports.toolkit.exposure import GrantState, SocketExposure
from mx_transports.toolkit.listeners import listen
from mx_transports.toolkit.pieces import MAX_PIECES, PIECE, devices_of
from mx_transports.toolkit.reach import is_loopback
from mx_transports.toolkit.stream import SocketStream
from mx_transports.ucx import nixl
from mx_transports.ucx.agent_process import AgentProcess
from mx_transports.ucx.wire import (
    BEGIN,
    DIRECT,
    END,
    FAILED,
    INFO,
    MAGIC,
    READY,
    REQUEST,
    RESPONSE,
    STARTING,
    AgentInfo,
    AgentRegion,
    devices_at,
    goes_direct,
)

if TYPE_CHECKING:
    from mx_transports.ucx.direct import DirectAgents
    from mx_transports.ucx.slots import SlotSteps, StagingSlots

#: How long an agent outlives its last reader, so that the next one does not wait for another.
LINGER_S = 30.0
#: An agent that dies is replaced for the next reader, but not more often than this.
MAX_DEATHS, DEATHS_WITHIN_S = 5, 60.0
MAX_REGIONS = 256
#: Reads that one connection may have begun and not ended; an honest reader begins a few.
MAX_RUNNING = 64
#: Sent so often while an agent starts, well within a reader's deadline.
STARTING_EVERY_S = 0.5


class UcxExposure(SocketExposure):
    """Sealed memfds, or a GPU's memory, behind listening sockets, one for each host of the
    options."""

    def __init__(
        self,
        regions: Sequence[ExposedRegion],
        options: ExposeOptions,
        bindings: str,
    ) -> None:
        beyond = [host for host in options.hosts if not is_loopback(host)]
        if beyond and not options.trusted_fabric:
            raise NotAllowedError(
                f"ucx enforces no bounds, and {beyond[0]} can be reached from other machines",
                hint="set `trusted_fabric` if every host on that network is trusted",
            )
        if len(regions) > MAX_REGIONS:
            raise LocalError(f"ucx exposes at most {MAX_REGIONS} regions, not {len(regions)}")
        self._slots: StagingSlots | None = None
        self._direct: DirectAgents | None = None
        self._setting = options.setting
        self._bindings = bindings
        self._place = options.place
        self._agents: dict[str, AgentProcess] = {}
        self._deaths: list[float] = []
        # The agents choose ports of their own, at the addresses that these sockets have.
        options = replace(options, ports=range(0), at_peer=False, background=False)
        with contextlib.ExitStack() as undo:
            if any(devices_of(region.view) for region in regions):
                from mx_transports.ucx.direct import DirectAgents
                from mx_transports.ucx.slots import StagingSlots

                self._slots = slots = StagingSlots(regions, options)
                undo.callback(slots.close)
                self._direct = DirectAgents(regions, bindings, self._keep_thread)
                self._mapped = [(slots.memfd, slots.nbytes)]
                self._regions = [(region.index, len(region.view)) for region in regions]
            else:
                sealed = [(region.index, *_sealed(region)) for region in regions]
                self._mapped = [(descriptor, nbytes) for _, nbytes, descriptor in sealed if nbytes]
                self._regions = [(index, nbytes) for index, nbytes, _ in sealed]
            super().__init__(name="mx-ucx-source", magic=MAGIC, options=options, listen=listen)
            undo.pop_all()
        self.start()

    def grant(self, grant_id: str) -> bytes:
        ticket = super().grant(grant_id)
        if len(self.listeners.sockets) == 1:
            # The reader will be here in a moment; which NIC it chooses is not a question.
            self._agent_at(self.listeners.sockets[0].getsockname()[0])
        return ticket

    def close(self) -> None:
        super().close()
        with self.lock:
            agents = list(self._agents.values())
        for agent in agents:
            agent.stop()
        if self._direct is not None:
            self._direct.close()

    # --- mx_transports.toolkit.exposure

    def released(self) -> None:
        self._regions.clear()
        if self._direct is not None:
            self._direct.release()
        if self._slots is not None:
            self._slots.close()

    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        host = stream.local_host
        agent = self._agent_at(host)
        while agent is not None and not agent.enter(stream):
            agent = self._agent_at(host)
        if agent is None:
            _tell(stream, FAILED, b"it has no agent: the last ones have died, or can't be started")
            return
        try:
            if not _started(stream, agent):
                return
            _tell(stream, READY, self._info(agent, host).encode())
            self._answer_reads(stream, grant, agent)
        finally:
            agent.leave(stream)
            if grant.revoked and not agent.used:
                # The reader was cut off, and knows how to read on.
                agent.stop()

    # --- agents

    def _agent_at(self, host: str) -> AgentProcess | None:
        """Return the agent of the NIC with this address, started if there is none; None if that is
        not to be tried again so soon, or at all."""
        with self.lock:
            if self.closed:
                return None
            agent = self._agents.get(host)
            if agent is not None and not agent.stopping:
                return agent
            now_s = time.monotonic()
            self._deaths = [then_s for then_s in self._deaths if now_s - then_s < DEATHS_WITHIN_S]
            if len(self._deaths) >= MAX_DEATHS:
                return None
            agent = AgentProcess(
                self._bindings,
                self._mapped,
                nixl.agent_environment(devices_at(self._place, host)),
                LINGER_S,
                self._agent_ended,
            )
            try:
                agent.thread.start()
            except RuntimeError:  # No more threads to be had.
                return None
            self._agents[host] = agent
            self.keep(agent.thread)
            return agent

    def _agent_ended(self, agent: AgentProcess) -> None:
        with self.lock:
            if agent.error:
                self._deaths.append(time.monotonic())
            for host in [host for host, known in self._agents.items() if known is agent]:
                del self._agents[host]

    def _info(self, agent: AgentProcess, host: str) -> AgentInfo:
        addresses = iter(() if self._slots is not None else agent.addresses)
        regions = {
            index: AgentRegion(next(addresses, 0) if nbytes else 0, nbytes)
            for index, nbytes in self._regions
        }
        slot_bytes = self._slots.slot_bytes if self._slots is not None else 0
        devices = devices_at(self._place, host)
        direct = self._direct is not None and goes_direct(self._setting, devices)
        return AgentInfo(agent.metadata, regions, devices, slot_bytes, direct)

    def _start_direct(self, stream: SocketStream) -> AgentProcess | None:
        """Give the reader an agent that has the GPU's memory, or the reason why there is none."""
        devices = devices_at(self._place, stream.local_host)
        with contextlib.ExitStack() as undo:
            try:
                if self._direct is None or not goes_direct(self._setting, devices):
                    raise LocalError("its GPU's memory is not read directly")
                agent = self._direct.start(devices)
                undo.callback(agent.stop)
                if not _started(stream, agent):
                    return None
                places = self._direct.places(agent)
            except MxError as error:
                _tell(stream, FAILED, error.message.encode())
                return None
            info = AgentInfo(agent.metadata, {}, devices, places=places)
            agent.count_reads(+1)  # its reader is not long without any
            _tell(stream, READY, info.encode())
            undo.pop_all()
        return agent

    def _keep_thread(self, thread: threading.Thread) -> None:
        with self.lock:
            self.keep(thread)

    # --- reads

    def _answer_reads(self, stream: SocketStream, grant: GrantState, agent: AgentProcess) -> None:
        request = memoryview(bytearray(REQUEST.size))
        running: set[int] = set()
        direct: AgentProcess | None = None
        turns = self._turns(grant)
        try:
            while True:
                if turns is not None:
                    for number, status, offset in turns.answers():
                        address = agent.addresses[0] + offset
                        stream.send_all([RESPONSE.pack(number, status, address)])
                    if not stream.comes(turns.wait_s):
                        continue
                stream.next_message(request)
                kind, number, generation, pieces = REQUEST.unpack(request)
                if pieces > (MAX_PIECES if turns is not None and kind == BEGIN else 0):
                    return  # Not one of ours; what follows can't be made sense of.
                table = memoryview(stream.receive(pieces * PIECE.size))
                if kind == DIRECT and not running:
                    if direct is None:
                        direct = self._start_direct(stream)
                    else:
                        direct.stop()
                        direct = None
                    continue
                if kind == BEGIN and number not in running and len(running) < MAX_RUNNING:
                    running.add(number)
                    agent.count_reads(+1)
                    self.count_reads(grant, +1)
                    if turns is not None and pieces:
                        turns.begin(number, generation, table)
                        continue
                elif kind == END and number in running:
                    running.remove(number)
                    agent.count_reads(-1)
                    self.count_reads(grant, -1)
                    if turns is not None:
                        turns.end(number)
                else:
                    return
                stream.send_all([RESPONSE.pack(number, self.status(generation), 0)])
        finally:
            agent.count_reads(-len(running))
            self.count_reads(grant, -len(running))
            if direct is not None:
                direct.stop()
            if turns is not None:
                turns.close()

    def _turns(self, grant: GrantState) -> SlotSteps | None:
        if self._slots is None:
            return None
        from mx_transports.ucx.slots import SlotSteps

        return SlotSteps(self._slots, grant, self.status)


def _sealed(region: ExposedRegion) -> tuple[int, int]:
    """Return a region's (nbytes, descriptor). Raises LocalError if it is not in a sealed memfd."""
    if region.memfd is None or not kernel.fully_sealed(region.memfd):
        raise LocalError(
            f"ucx exposes sealed memfds only, and region {region.index} is in other memory: an "
            "agent that shared it could write to it"
        )
    return len(region.view), region.memfd


def _started(stream: SocketStream, agent: AgentProcess) -> bool:
    """Wait until an agent is ready. Return False, and tell the reader why, if it never will be."""
    while not agent.settled.wait(STARTING_EVERY_S):
        _tell(stream, STARTING)
    if agent.ended:
        _tell(stream, FAILED, f"its agent: {agent.error or 'ended'}".encode())
    return not agent.ended


def _tell(stream: SocketStream, kind: int, data: bytes = b"") -> None:
    stream.send_all([INFO.pack(kind, len(data)), data])
