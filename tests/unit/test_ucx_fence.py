"""What ucx gives back is out of its agent's reach: nothing has failed while that can write."""

from __future__ import annotations

import gc
import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mx.errors import ClosedError, PathError, PeerLostError, PeerTimeoutError, SourceError
from mx.testing import conformance
from mx.testing.bench import Bench
from mx.transport import Session
from mx_transports.ucx import nixl
from mx_transports.ucx.exposure import UcxExposure
from mx_transports.ucx.session import UcxSession

READS = 3

pytestmark = pytest.mark.skipif(nixl.find() is None, reason="NIXL is not installed")


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(conformance.Harness("mx_transports.ucx:UcxTransport")) as bench:
        yield bench


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """So that nothing is destroyed by chance."""
    gc.disable()
    yield
    gc.enable()


class Running:
    """Some reads in their middle: the first waits at its first `landed`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        nbytes = bench.harness.big_nbytes
        self.source = bench.source(nbytes)
        session = bench.open(self.source)
        assert isinstance(session, UcxSession)
        self.session: Session = session
        self.agent: Callable[[], Any] = weakref.ref(session._agent._agent)
        self.alive_at_failure: list[bool] = []
        view = memoryview(bytearray(nbytes))

        self.sinks = [bench.sink(hold=not n, on_end=self._note) for n in range(READS)]
        part = nbytes // READS
        for n, sink in enumerate(self.sinks):
            bench.read(session, 0, n * part, view[n * part : (n + 1) * part], tag="x", sink=sink)
        bench.wait(self.sinks[0].held, "no first bytes")

    def _note(self) -> None:
        if any(sink.failures for sink in self.sinks):
            self.alive_at_failure.append(self.agent() is not None)

    def signal_agent(self, number: int) -> None:
        """To the process of the source's agent."""
        assert isinstance(self.source.exposure, UcxExposure)
        (agent,) = self.source.exposure._agents.values()
        os.kill(agent.pid, number)

    def go(self) -> None:
        self.sinks[0].release()


def die(running: Running) -> None:
    running.signal_agent(signal.SIGKILL)


def stop(running: Running) -> None:
    running.signal_agent(signal.SIGSTOP)


def close(running: Running) -> None:
    running.session.close()


ENDS = [(die, PeerLostError), (stop, PeerTimeoutError), (close, ClosedError)]


@pytest.mark.parametrize(("end", "kind"), ENDS)
def test_nothing_has_failed_before_the_agent_is_destroyed(
    bench: Bench, end: Callable[[Running], None], kind: type[Exception]
) -> None:
    running = Running(bench)
    end(running)
    running.go()
    bench.finish(*running.sinks)
    assert running.sinks[-1].failures
    assert isinstance(running.sinks[-1].failures[0], kind)
    assert not any(running.alive_at_failure)


@pytest.mark.parametrize(("end", "kind"), ENDS)
def test_an_agent_that_cannot_be_shown_to_be_gone_gives_nothing_back(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[Running], None],
    kind: type[Exception],
) -> None:
    running = Running(bench)
    # As a frame does that a traceback keeps.
    method = [running.agent().getXferStatus]
    end(running)
    running.go()
    bench.eventually(
        lambda: any("still refers to its agent" in text for text in caplog.messages),
        lambda: "it was not said that something keeps the agent",
    )
    assert not running.sinks[-1].ended.wait(1.0)
    running.session.close()
    assert not running.session.join(0.1)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    method.clear()
    bench.finish(*running.sinks)
    assert isinstance(running.sinks[-1].failures[0], (kind, ClosedError))
    assert not any(running.alive_at_failure)
    assert running.session.join(bench.harness.deadline_s)


def test_an_agent_in_a_cycle_of_references_is_found(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(bench)
    cycle: list[Any] = [running.agent().getXferStatus]
    cycle.append(cycle)
    del cycle
    die(running)
    running.go()
    bench.finish(*running.sinks)
    assert not any(running.alive_at_failure)
    assert not caplog.records


def test_no_traceback_keeps_an_agent() -> None:
    """Neither of what NIXL raises, nor of what mx makes of it."""
    agent = nixl.TargetAgent("peer:1", "lo")
    alive = weakref.ref(agent._agent)
    caught: list[SourceError] = []
    block = nixl.AddressRange(4096, 8)
    calls = (lambda: agent.connect(b"no metadata"), lambda: agent.post([block], [block]))
    for call in calls:
        with pytest.raises(PathError) as raised:
            call()
        caught.append(raised.value)
    assert agent.close()
    assert alive() is None
    assert len(caught) == len(calls)
