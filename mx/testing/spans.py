"""Bytes that a rule reads into, wherever they are: made, looked at and written by these three.

Host memory is a memoryview; what is on a GPU is copied to and from the host by the CUDA driver.
"""

from __future__ import annotations

import ctypes

from mx.cuda import driver as cuda
from mx.cuda.device import CudaStream, Device, DeviceMemory
from mx.transport import DeviceView, Span, View, contiguous

HOST = "cpu"


def destination(nbytes: int, device: str = HOST) -> Span:
    """Return new memory in the host or on "cuda:N"; it goes with the last reference to it."""
    if device == HOST:
        return memoryview(bytearray(nbytes))
    with Device.open(cuda.load(), device) as opened:
        memory = DeviceMemory(opened, max(nbytes, 1))
        return DeviceView(opened.key, memory.address, nbytes, memory)


def peek(view: View) -> bytes:
    """Return what a view, which is in one place, holds now. Waits for nothing but its own copy."""
    span = contiguous(view)
    if isinstance(span, memoryview):
        return bytes(span)
    found = bytearray(span.nbytes)
    _copy(span, found, into_span=False)
    return bytes(found)


def poke(span: Span, data: bytes) -> None:
    """Overwrite the span; `data` is as long."""
    if isinstance(span, memoryview):
        span[:] = data
    else:
        _copy(span, bytearray(data), into_span=True)


def _copy(span: DeviceView, host: bytearray, *, into_span: bool) -> None:
    if not host:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    with Device.open(cuda.load(), span.device) as device, CudaStream(device) as stream:
        driver = device.driver
        with device.current():
            if into_span:
                driver.copy_htod(span.address, address, len(host), stream.handle)
            else:
                driver.copy_dtoh(address, span.address, len(host), stream.handle)
        stream.synchronize()
