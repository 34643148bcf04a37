"""xxh3_128 of blocks of device memory, computed on the device at memory speed.

`BlockDigester` hashes blocks of up to 1 MiB, many at a time. `DeviceHasher` uses it to hash blocks
that land, with the digests of `mx.core.digest.shortcut_digest`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

from xxhash import xxh3_128_digest

from mx.core.grid import BLOCK_BYTES
from mx.cuda import xxh3
from mx.cuda.device import Device, DeviceMemory, PinnedMemory, Stream
from mx.cuda.driver import DeviceAttribute
from mx.cuda.xxh3_table import MAX_UNITS, PROGRAM_UNITS, TABLE
from mx.transport import DeviceView

#: Up to this length XXH3 uses other methods than for long inputs; such blocks are hashed on the
#: host.
_SHORT_BYTES = 240
#: Blocks in a batch: 8 MiB of sums on the device.
_BATCH_BLOCKS = 128
#: Blocks in a batch that are in pieces and have to be assembled first: 16 MiB on the device.
_GATHER_BLOCKS = 16

#: The parts of a block in order, as (address, bytes).
Block = Sequence[tuple[int, int]]


class BlockDigester:
    """Computes digests of blocks of one device's memory. Thread-safe; simultaneous callers share a
    batch.

    Owns a stream, 8 to 24 MiB of device memory and 48 KiB of pinned memory until `close`, before
    which all calls must have returned.

    Raises:
        LocalError: The kernels can't be compiled.
        CudaError: Memory is short, or the driver fails.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        driver = device.driver
        major, minor = (
            driver.device_attribute(device.ordinal, attribute)
            for attribute in (
                DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
                DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
            )
        )
        self._kernels = kernels = xxh3.compiled(10 * major + minor)
        self._functions: dict[str, int] = {}
        with device.current():
            for kernel in (kernels.unit_sums, kernels.finish):
                module = driver.module_load(kernel.cubin)
                self._functions[kernel.name] = driver.module_function(module, kernel.name)
        self._stream = Stream(device)
        # Each on the host and on the device: addresses, lengths, digests; and the short inputs.
        self._host = PinnedMemory(device, _BATCH_BLOCKS * (8 + 8 + 16 + 256))
        self._lists = DeviceMemory(device, _BATCH_BLOCKS * (8 + 8 + 16) + 8 * len(TABLE))
        self._sums = DeviceMemory(device, _BATCH_BLOCKS * MAX_UNITS * 64)
        self._gather: DeviceMemory | None = None
        self._table = self._lists.address + _BATCH_BLOCKS * 32
        self._view = self._host.view()
        self._upload_table()
        self._queue_lock = threading.Lock()
        self._work_lock = threading.Lock()
        self._queue: list[_Request] = []

    def _upload_table(self) -> None:
        table = struct.pack(f"<{len(TABLE)}Q", *TABLE)
        self._view[: len(table)] = table
        with self._device.current():
            self._device.driver.copy_htod(
                self._table, self._host.address, len(table), self._stream.handle
            )
        self._stream.synchronize()

    def digests(self, blocks: Sequence[Block]) -> list[bytes]:
        """Return the 16-byte digest of each block.

        Args:
            blocks: Blocks of 1 byte to 1 MiB, in one part or several. Their bytes must be in place,
                and not change meanwhile.

        Raises:
            CudaError: The driver fails.
        """
        request = _Request(blocks)
        with self._queue_lock:
            self._queue.append(request)
        with self._work_lock:
            if not request.done:
                with self._queue_lock:
                    requests, self._queue = self._queue, []
                self._serve(requests)
        if request.error is not None:
            raise request.error
        return request.digests

    def _serve(self, requests: Sequence[_Request]) -> None:
        blocks = [block for request in requests for block in request.blocks]
        error: BaseException | None = None
        found: list[bytes] = []
        try:
            with self._device.current():
                while len(found) < len(blocks):
                    found += self._batch(blocks[len(found) :])
        except BaseException as caught:
            error = caught
            raise
        finally:
            for request in requests:
                request.done, request.error = True, error
                request.digests, found = found[: len(request.blocks)], found[len(request.blocks) :]

    def _batch(self, blocks: Sequence[Block]) -> list[bytes]:
        """Return the digests of the first blocks, as many as fit into one batch, at least one."""
        driver, stream, view = self._device.driver, self._stream.handle, self._view
        lengths_at, digests_at, short_at = (_BATCH_BLOCKS * n for n in (8, 16, 32))
        sizes: list[int] = []
        long = gathered = 0
        for block in blocks[:_BATCH_BLOCKS]:
            size = sum(nbytes for _, nbytes in block)
            if not 0 < size <= BLOCK_BYTES:
                raise ValueError(f"a block has 1 byte to 1 MiB, not {size}")
            if size <= _SHORT_BYTES:
                at = self._host.address + short_at + 256 * len(sizes)
                for address, nbytes in block:
                    driver.copy_dtoh(at, address, nbytes, stream)
                    at += nbytes
            else:
                address = block[0][0]
                if len(block) > 1 or address % 8:
                    if gathered == _GATHER_BLOCKS:
                        break
                    address = self._put_together(block, gathered)
                    gathered += 1
                struct.pack_into("<Q", view, 8 * long, address)
                struct.pack_into("<Q", view, lengths_at + 8 * long, size)
                long += 1
            sizes.append(size)
        if long:
            self._launch(long)
            driver.copy_dtoh(
                self._host.address + digests_at, self._lists.address + digests_at, 16 * long, stream
            )
        driver.stream_synchronize(stream)
        halves = iter(struct.iter_unpack("<QQ", view[digests_at : digests_at + 16 * long]))
        return [
            xxh3_128_digest(view[short_at + 256 * i : short_at + 256 * i + size])
            if size <= _SHORT_BYTES
            else struct.pack(">QQ", *next(halves))
            for i, size in enumerate(sizes)
        ]

    def _put_together(self, block: Block, slot: int) -> int:
        if self._gather is None:
            self._gather = DeviceMemory(self._device, _GATHER_BLOCKS * BLOCK_BYTES)
        address = at = self._gather.address + slot * BLOCK_BYTES
        for part, nbytes in block:
            self._device.driver.copy_dtod(at, part, nbytes, self._stream.handle)
            at += nbytes
        return address

    def _launch(self, count: int) -> None:
        driver, stream, kernels = self._device.driver, self._stream.handle, self._kernels
        inputs = self._lists.address
        lengths, digests = inputs + 8 * _BATCH_BLOCKS, inputs + 16 * _BATCH_BLOCKS
        for at, nbytes in ((0, 8 * count), (8 * _BATCH_BLOCKS, 8 * count)):
            driver.copy_htod(inputs + at, self._host.address + at, nbytes, stream)
        common = (inputs, lengths, self._table, self._sums.address)
        programs = MAX_UNITS // PROGRAM_UNITS
        for kernel, grid, own in (
            (kernels.unit_sums, (count, programs), common),
            (kernels.finish, (count, 1), (*common, digests)),
        ):
            parameters = (*own, *(0,) * (kernel.parameters - len(own)))
            function = self._functions[kernel.name]
            driver.launch(function, grid, kernel.threads, kernel.shared_nbytes, stream, parameters)

    def close(self) -> None:
        """Free the stream and the memory. Idempotent."""
        self._view = memoryview(b"")
        self._stream.close()
        for owned in (self._gather, self._sums, self._lists, self._host):
            if owned is not None:
                owned.close()


class _Request:
    __slots__ = ("blocks", "digests", "done", "error")

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.digests: list[bytes] = []
        self.done = False
        self.error: BaseException | None = None


class DeviceHasher:
    """Hashes blocks in device memory, as `BlockHasher` does in host memory.

    `digests` computes digests of blocks (`BlockDigester.digests`). Bytes announced by `landed` are
    in place on the device, not merely under way. Hashing begins with `block_digests`, since a
    chunk's blocks are one batch. Not thread-safe: one thread at a time.
    """

    __slots__ = ("_blocks", "_digests")

    def __init__(
        self,
        blocks: Sequence[DeviceView],
        digests: Callable[[Sequence[Block]], list[bytes]],
    ) -> None:
        self._digests = digests
        self._blocks: list[Block] = [[(block.address, len(block))] for block in blocks]

    def landed(self, payload_nbytes: int) -> None:
        """Do nothing: a launch for some of the bytes would cost more than it saves."""

    def block_digests(self) -> bytes:
        """Return the digests of all blocks, concatenated. Raises CudaError, LocalError."""
        return b"".join(self._digests(self._blocks))
