"""The *verified* signal: a word that the CPU writes releases a consumer's stream."""

import ctypes

from mx.cuda.device import CudaEvent, CudaStream, Device, PinnedMemory
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import MIB


def test_a_stream_waits_for_the_verified_word(gpu: Device) -> None:
    driver = gpu.driver
    source, target = (spans.destination(MIB, gpu.key) for _ in range(2))
    assert isinstance(source, DeviceView) and isinstance(target, DeviceView)
    spans.poke(source, b"old." * (MIB // 4))
    with PinnedMemory(gpu, 4096) as words, CudaStream(gpu) as consumer, CudaEvent(gpu) as used:
        word = ctypes.c_uint32.from_address(words.address)
        word.value = 0
        with gpu.current():
            driver.stream_wait_value(consumer.handle, words.device_address, 1)
            driver.copy_dtod(target.address, source.address, MIB, consumer.handle)
        used.record(consumer)
        # The bytes land after the consumer's work was queued.
        spans.poke(source, b"new!" * (MIB // 4))
        assert not used.done(), "the stream did not wait"
        word.value = 1
        used.synchronize()
        assert spans.peek(target) == b"new!" * (MIB // 4)


def test_words_are_compared_cyclically(gpu: Device) -> None:
    """A word may wrap around: >= is modulo 2**32."""
    with PinnedMemory(gpu, 4096) as words, CudaStream(gpu) as consumer:
        word = ctypes.c_uint32.from_address(words.address)
        word.value = 2
        with gpu.current():
            gpu.driver.stream_wait_value(consumer.handle, words.device_address, (1 << 32) - 1)
        consumer.synchronize()
