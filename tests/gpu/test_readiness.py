"""Streams wait for layers; a failed pull lets them go, and is found out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from mx.cuda.device import CudaStream, Device, DeviceMemory, PinnedMemory
from mx.errors import ClosedError, DigestError, LocalError
from mx.memory.readiness import LayerReadiness, LayerSignals
from mx.testing import spans
from mx.transport import DeviceView
from tests.gpu.rig import Spy


@pytest.fixture
def signals(gpu: Device) -> Iterator[LayerSignals]:
    with LayerSignals(Device(gpu.driver, 0), 3, 60.0) as found:
        yield found


@pytest.fixture
def memory(gpu: Device) -> Iterator[DeviceMemory]:
    with DeviceMemory(gpu, 8) as found:
        spans.poke(bytes_of(found), bytes(8))
        yield found


def bytes_of(memory: DeviceMemory) -> DeviceView:
    return DeviceView(memory.device.key, memory.address, 8, memory)


def use(gpu: Device, memory: DeviceMemory, stream: CudaStream) -> None:
    with gpu.current():
        gpu.driver.memset(memory.address, 1, 8, stream.handle)


def used(memory: DeviceMemory) -> bool:
    return spans.peek(bytes_of(memory)) == b"\1" * 8


def test_a_stream_waits_until_verified(
    gpu: Device, spy: Spy, signals: LayerSignals, memory: DeviceMemory
) -> None:
    with CudaStream(gpu) as stream:
        signals.wait_verified(1, stream.handle)
        use(gpu, memory, stream)
        signals.verified(0)
        assert not stream.done() and not used(memory)
        with pytest.raises(ClosedError, match="not verified yet"):
            signals.check([1])
        signals.verified(1)
        stream.synchronize()
        assert used(memory)
        signals.check([0, 1])
        signals.wait_verified(1, stream.handle)  # nothing to wait for any more
        assert spy.calls["cuStreamWaitValue32"] == 1


def test_failure_releases_and_poisons(
    gpu: Device, signals: LayerSignals, memory: DeviceMemory
) -> None:
    with CudaStream(gpu) as stream:
        signals.verified(0)
        signals.wait_verified(2, stream.handle)
        use(gpu, memory, stream)
        signals.failed(DigestError("chunk 7 does not match its digest"))
        stream.synchronize()
        assert used(memory)  # it went on, with whatever was there
        signals.check([0])
        with pytest.raises(DigestError, match="chunk 7"):
            signals.check()
        with pytest.raises(DigestError, match="chunk 7"):
            signals.wait_verified(1, stream.handle)
        signals.verified(2)  # too late
        assert signals.state(2) is LayerReadiness.POISONED


def test_a_stream_that_holds_up_the_pull_is_let_go(gpu: Device, memory: DeviceMemory) -> None:
    with LayerSignals(Device(gpu.driver, 0), 2, 0.05) as signals, CudaStream(gpu) as stream:
        signals.verified(0)
        signals.wait_verified(1, stream.handle)
        use(gpu, memory, stream)
        stream.synchronize()
        signals.check([0])
        with pytest.raises(LocalError, match="no layer became ready"):
            signals.check()


def test_close_lets_go_of_streams_that_wait(
    gpu: Device, signals: LayerSignals, memory: DeviceMemory
) -> None:
    with CudaStream(gpu) as stream:
        signals.wait_verified(0, stream.handle)
        use(gpu, memory, stream)
        signals.close()
        signals.close()
        stream.synchronize()
        with pytest.raises(ClosedError):
            signals.wait_verified(0, stream.handle)
        with pytest.raises(ClosedError):
            signals.check()


def test_what_is_freed_meanwhile_is_freed_afterwards(
    gpu: Device, spy: Spy, signals: LayerSignals
) -> None:
    """A free would wait for the streams, and in some drivers other threads' copies for the free."""
    host, device = PinnedMemory(gpu, 4096), DeviceMemory(gpu, 4096)
    names = ("cuMemFreeHost", "cuMemFree")
    with CudaStream(gpu) as stream:
        signals.wait_verified(0, stream.handle)
        host.close()
        device.close()
        assert [spy.calls[name] for name in names] == [0, 0]
        for layer in range(3):
            signals.verified(layer)
        until_s = time.monotonic() + 10
        while not all(spy.calls[name] for name in names) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert [spy.calls[name] for name in names] == [1, 1]
