"""Streams wait for layers; a failed pull lets them go, and is found out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from mx.cuda.device import Device, DeviceMemory, Stream
from mx.errors import ClosedError, DigestError, LocalError
from mx.memory.readiness import LayerSignals, Readiness
from tests.support.fake_cuda import FakeDriver


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    yield driver
    assert driver.live() == []


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(fake, 0) as found:
        yield found


@pytest.fixture
def signals(fake: FakeDriver) -> Iterator[LayerSignals]:
    with LayerSignals(Device(fake, 0), 3) as found:
        yield found


@pytest.fixture
def memory(device: Device) -> Iterator[DeviceMemory]:
    with DeviceMemory(device, 8) as found:
        ctypes.memset(found.address, 0, 8)
        yield found


def use(device: Device, memory: DeviceMemory, stream: Stream) -> None:
    with device.current():
        device.driver.memset(memory.address, 1, 8, stream.handle)


def used(memory: DeviceMemory) -> bool:
    return ctypes.string_at(memory.address, 8) == b"\1" * 8


def test_a_stream_waits_until_verified(
    device: Device, signals: LayerSignals, memory: DeviceMemory
) -> None:
    with Stream(device) as stream:
        signals.wait_verified(1, stream.handle)
        use(device, memory, stream)
        signals.verified(0)
        assert not stream.done() and not used(memory)
        with pytest.raises(ClosedError, match="not verified yet"):
            signals.check([1])
        signals.verified(1)
        stream.synchronize()
        assert used(memory)
        signals.check([0, 1])
        calls = device.driver.calls["stream_wait_value"]  # type: ignore[attr-defined]
        signals.wait_verified(1, stream.handle)  # nothing to wait for any more
        assert device.driver.calls["stream_wait_value"] == calls  # type: ignore[attr-defined]


def test_failure_releases_and_poisons(
    device: Device, signals: LayerSignals, memory: DeviceMemory
) -> None:
    with Stream(device) as stream:
        signals.verified(0)
        signals.wait_verified(2, stream.handle)
        use(device, memory, stream)
        signals.failed(DigestError("chunk 7 does not match its digest"))
        stream.synchronize()
        assert used(memory)  # it went on, with whatever was there
        signals.check([0])
        with pytest.raises(DigestError, match="chunk 7"):
            signals.check()
        with pytest.raises(DigestError, match="chunk 7"):
            signals.wait_verified(1, stream.handle)
        signals.verified(2)  # too late
        assert signals.state(2) is Readiness.POISONED


def test_a_stream_that_holds_up_the_pull_is_let_go(
    device: Device, fake: FakeDriver, memory: DeviceMemory
) -> None:
    with LayerSignals(Device(fake, 0), 2, 0.05) as signals, Stream(device) as stream:
        signals.verified(0)
        signals.wait_verified(1, stream.handle)
        use(device, memory, stream)
        stream.synchronize()
        signals.check([0])
        with pytest.raises(LocalError, match=r"no layer became ready in 0\.05 s while streams"):
            signals.check()


def test_close_lets_go_of_streams_that_wait(
    device: Device, signals: LayerSignals, memory: DeviceMemory
) -> None:
    with Stream(device) as stream:
        signals.wait_verified(0, stream.handle)
        use(device, memory, stream)
        signals.close()
        signals.close()
        stream.synchronize()
        with pytest.raises(ClosedError):
            signals.wait_verified(0, stream.handle)
        with pytest.raises(ClosedError):
            signals.check()
