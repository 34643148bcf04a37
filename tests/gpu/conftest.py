"""Keeps the GPU's context for all tests, or skips them with the driver's reason."""

from collections.abc import Iterator

import pytest

from mx.cuda import driver as cuda
from mx.cuda.device import Device, PinnedMemory, Stream
from mx.transport import Unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.get_closest_marker("gpu")]
    found = cuda.probe() if here else None
    if isinstance(found, Unavailable):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=found.reason))


@pytest.fixture(scope="session")
def gpu() -> Iterator[Device]:
    """Give GPU 0."""
    with Device(cuda.load(), 0) as device:
        yield device


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Let CUDA make what it makes once and keeps (threads, descriptors) before any test."""
    if isinstance(cuda.probe(), Unavailable):
        yield
        return
    with Device(cuda.load(), 0) as device:
        with Stream(device) as stream, PinnedMemory(device, 4096):
            stream.synchronize()
        yield
