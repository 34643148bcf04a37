"""The source side of GPUDirect: agents that have the GPU's memory itself, each for one reader.

UCX aborts the process of an agent whose reader leaves in the middle of a read, or whose copy fails.
So a reader has an agent of its own: what ends it ends the reads of this reader alone, and once the
process is gone nothing reads the memory. Each needs a context on the GPU: they are few, and other
readers are served through slots.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from mx.errors import LocalError
from mx.transport import DeviceView, ExposedRegion, ScatteredView
from mx_transports.ucx import nixl
from mx_transports.ucx.agent_process import AgentProcess
from mx_transports.ucx.gpu_memory import GpuImports
from mx_transports.ucx.wire import GpuPlace

#: Agents at a time, whatever the number of readers.
MAX_AGENTS = 4
#: Where so many have ended by themselves within so long, no more are started.
MAX_DEATHS, DEATHS_WITHIN_S = 5, 60.0
#: What readers are told of an agent holds so many.
MAX_PLACES = 8192


class DirectAgents:
    """Those of one exposure. Thread-safe; no other lock is held at a call.

    Args:
        regions: The exposure's, in the memory of one GPU.
        bindings: The path of NIXL's extension module.
        keep: Is called with the thread of each agent.
    """

    def __init__(
        self,
        regions: Sequence[ExposedRegion],
        bindings: str,
        keep: Callable[[threading.Thread], None],
    ) -> None:
        self._regions, self._bindings, self._keep = list(regions), bindings, keep
        self._lock = threading.Lock()
        self._memory: GpuImports | None = None
        self._agents: set[AgentProcess] = set()
        self._deaths: list[float] = []
        self._closed = False

    def start(self, devices: Sequence[str]) -> AgentProcess:
        """Start an agent, which the caller stops.

        Args:
            devices: UCX's names of those that it uses.

        Raises:
            MxError: There are too many, the last ones have died, or it can't have the memory.
        """
        with self._lock:
            now_s = time.monotonic()
            self._deaths = [then_s for then_s in self._deaths if now_s - then_s < DEATHS_WITHIN_S]
            if self._closed or len(self._agents) >= MAX_AGENTS or len(self._deaths) >= MAX_DEATHS:
                raise LocalError("no agent of a GPU's memory is to be had now")
            if self._memory is None:
                self._memory = GpuImports([span for _, _, span in self._spans()])
            agent = AgentProcess(
                self._bindings,
                [],
                nixl.agent_environment(devices, self._memory.gpu),
                math.inf,
                self._ended,
                self._memory.new,
            )
            try:
                agent.thread.start()
            except RuntimeError as error:
                raise LocalError(str(error)) from error
            self._agents.add(agent)
        self._keep(agent.thread)
        return agent

    def places(self, agent: AgentProcess) -> tuple[GpuPlace, ...]:
        """Return where an agent that has started has the regions. Raises LocalError: in too
        many places."""
        memory = self._memory
        assert memory is not None
        found: list[GpuPlace] = []
        for region, begin, span in self._spans():
            for number, offset, nbytes in memory.parts(span.address, len(span)):
                found.append(GpuPlace(region, begin, agent.addresses[number] + offset, nbytes))
                begin += nbytes
        if len(found) > MAX_PLACES:
            raise LocalError(f"the memory is in more than {MAX_PLACES} places")
        return tuple(found)

    def _spans(self) -> list[tuple[int, int, DeviceView]]:
        """Return (region, where it begins there, memory) of all memory, in order."""
        found: list[tuple[int, int, DeviceView]] = []
        for region in self._regions:
            view = region.view
            whole = view.located() if isinstance(view, ScatteredView) else ([0], [view])
            for begin, span in zip(*whole, strict=True):
                if isinstance(span, DeviceView) and len(span):
                    found.append((region.index, begin, span))
        return found

    def _ended(self, agent: AgentProcess) -> None:
        with self._lock:
            self._agents.discard(agent)
            if agent.error:
                self._deaths.append(time.monotonic())

    def close(self) -> None:
        """Start no more, and end all soon. Idempotent."""
        with self._lock:
            self._closed = True
            agents = list(self._agents)
        for agent in agents:
            agent.stop()

    def release(self) -> None:
        """Wait until the last agent is gone, and let the memory go. Idempotent."""
        self.close()
        while agents := list(self._agents):
            agents[0].thread.join()
        if self._memory is not None:
            self._memory.close()
        self._regions.clear()
