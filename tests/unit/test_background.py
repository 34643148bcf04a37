"""A source whose process has work of its own serves readers at low priority."""

from __future__ import annotations

import os
import threading

import pytest

from mx.testing.memory import Kind, Memory
from mx.transport import ExposeOptions, Grant, Transport
from mx_transports.shm import ShmTransport
from mx_transports.tcp import TcpTransport


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("transport", "name"), [(TcpTransport(), "mx-tcp-source"), (ShmTransport(), "mx-shm")]
)
def test_readers_are_served_in_the_background(
    transport: Transport, name: str, background: bool
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    memory = Memory(4096, 1, Kind.ANONYMOUS)
    exposure = transport.expose([memory.region(0)], ExposeOptions(background=background))
    exposure.set_generation(1)
    try:
        session = transport.open(Grant("g", exposure.grant("g"), 1, (4096,), "source.test:1"))
        serving = [thread.native_id for thread in threading.enumerate() if thread.name == name]
        found = {os.getpriority(os.PRIO_PROCESS, each) for each in serving if each is not None}
        session.close()
        assert session.join(10)
    finally:
        exposure.close()
        assert exposure.join(10)
        memory.close()
    assert found == ({10} if background else {own})
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
