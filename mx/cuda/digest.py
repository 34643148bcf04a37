"""blake3 of blocks of device memory, computed on the device, or on the host where that can't be.

`BlockDigester` hashes blocks of up to 1 MiB on the device, many at a time; `RingDigester` copies
them to the host. `digester` returns one of them. `DeviceHasher` hashes the blocks of one read.
`mx.cuda.digest_table` hashes what a pull receives, by the same kernel.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from mx.core.digest import block_digest
from mx.core.grid import BLOCK_BYTES
from mx.cuda import blake3
from mx.cuda.blake3 import CHAINS_BYTES, DIGEST_BYTES, UNIT_BYTES
from mx.cuda.device import CudaEvent, CudaStream, Device, DeviceMemory, PinnedMemory
from mx.cuda.driver import DeviceAttribute
from mx.cuda.errors import GONE_CODES, CudaError
from mx.cuda.ring import PinnedRing
from mx.errors import LocalError
from mx.transport import DeviceView

log = logging.getLogger(__name__)

#: The most blocks of a launch: those of 512 MiB, with 16 MiB of chaining values.
LAUNCH_BLOCKS = 512
#: Bytes of the longest list of addresses and lengths; the digests follow it, then a word.
_LIST_BYTES = LAUNCH_BLOCKS * (8 + 8)

#: A block of this many bytes of this value is hashed before all others: several chunks, and a part.
_TRIAL_BYTES, _TRIAL_VALUE = 5000, 0x6D

#: A block: its address, and its length in bytes.
Block = tuple[int, int]


class Digester(Protocol):
    """Computes digests of blocks of one device's memory. Thread-safe."""

    def digests(self, blocks: Sequence[Block]) -> list[bytes]:
        """Return the blake3 digest of each block, as `BlockDigester.digests`."""

    def close(self) -> None:
        """Free what it owns. Idempotent. All calls must have returned."""


def digester(device: Device, ring: Callable[[], PinnedRing]) -> Digester:
    """Return a digester that works on the device, or one on the host where its kernel can't: there
    is no compiler, or the driver does not load what it made. The log says so.

    Args:
        device: The GPU, which the caller keeps open.
        ring: Returns the ring for copies to the host, called only then; the caller's.

    Raises:
        CudaError: The device's context is broken.
    """
    try:
        return BlockDigester(device)
    except LocalError as error:
        if isinstance(error, CudaError) and error.code in GONE_CODES:
            raise
        log.warning(
            "%s is hashed on the host, which takes its bytes over PCIe: %s", device.key, error
        )
        return RingDigester(ring())


def kernel_of(found: Digester) -> DigestKernel | None:
    """Return the kernel of a digester that works on the device; None for one on the host."""
    return found.kernel if isinstance(found, BlockDigester) else None


class RingDigester:
    """A `Digester` that copies the blocks to pinned memory, and hashes them there. The ring stays
    the caller's."""

    def __init__(self, ring: PinnedRing) -> None:
        self._ring = ring

    def digests(self, blocks: Sequence[Block]) -> list[bytes]:
        return [block_digest(piece) for piece in self._ring.pieces(blocks)]

    def close(self) -> None:
        pass


class DigestKernel:
    """The kernel of digests, loaded into a device's context, with which it stays.

    Raises:
        LocalError: It can't be compiled.
        CudaError: The driver does not load it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        driver = device.driver
        major, minor = (
            driver.device_attribute(device.ordinal, attribute)
            for attribute in (
                DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
                DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
            )
        )
        self._image = image = blake3.compiled(10 * major + minor)
        with device.current():
            self._function = driver.module_function(driver.module_load(image.cubin), image.name)

    def launch(self, count: int, places: Sequence[int], stream: int) -> None:
        """Queue the digests of up to `LAUNCH_BLOCKS` blocks. The device's context is current.

        Args:
            count: How many blocks.
            places: Device addresses of the kernel's arguments, in its order.
            stream: The stream's handle.

        Raises:
            CudaError: The driver fails.
        """
        image = self._image
        self.device.driver.launch(
            self._function,
            (count, 1),
            image.threads,
            image.shared_nbytes,
            stream,
            (*places, *(0,) * (image.parameters - len(places))),
        )


class BlockDigester:
    """Computes digests of blocks on the device. Thread-safe; simultaneous callers share a batch.

    Owns a stream, 16 MiB of device memory and 24 KiB of pinned memory until `close`, before which
    all calls must have returned.

    Raises:
        LocalError: The kernel can't be compiled, or computes something else.
        CudaError: Memory is short, or the driver fails.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends = contextlib.ExitStack()
        self.kernel = DigestKernel(device)
        self._view = memoryview(b"")
        self._queue_lock = threading.Lock()
        self._work_lock = threading.Lock()
        self._queue: list[_DigestRequest] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            own = self._ends.enter_context
            # Both on the host and on the device: addresses, lengths; and digests.
            nbytes = _LIST_BYTES + LAUNCH_BLOCKS * DIGEST_BYTES
            self._host = own(PinnedMemory(device, nbytes))
            self._lists = own(DeviceMemory(device, nbytes + UNIT_BYTES))
            self._chains = own(DeviceMemory(device, LAUNCH_BLOCKS * CHAINS_BYTES))
            self._stream, self._hashed = own(CudaStream(device)), own(CudaEvent(device))
            self._view = self._host.view()
            self._try()
            undo.pop_all()

    def _try(self) -> None:
        """Raise LocalError unless the kernel computes blake3 on this device."""
        with DeviceMemory(self._device, _TRIAL_BYTES + UNIT_BYTES) as trial:
            with self._device.current():
                self._device.driver.memset(
                    trial.address, _TRIAL_VALUE, trial.nbytes, self._stream.handle
                )
            found = self.digests([(trial.address, _TRIAL_BYTES)])
        if found != [block_digest(bytes([_TRIAL_VALUE]) * _TRIAL_BYTES)]:
            raise LocalError(f"the kernel computes a wrong digest on {self._device.key}")

    def digests(self, blocks: Sequence[Block]) -> list[bytes]:
        """Return the blake3 digest of each block, 32 bytes.

        Args:
            blocks: Addresses, which are multiples of 16, and lengths of 1 byte to 1 MiB. The bytes
                must be in place, and not change meanwhile. Those that follow a block up to the next
                multiple of 16 are read too; what they are makes no difference.

        Raises:
            ValueError: A block is empty, longer than 1 MiB, or starts elsewhere.
            CudaError: The driver fails.
        """
        for address, nbytes in blocks:
            if not 0 < nbytes <= BLOCK_BYTES:
                raise ValueError(f"a block has 1 byte to 1 MiB, not {nbytes}")
            if address % UNIT_BYTES:
                raise ValueError(f"a block starts at a multiple of {UNIT_BYTES}, not {address:#x}")
        request = _DigestRequest(blocks)
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

    def _serve(self, requests: Sequence[_DigestRequest]) -> None:
        blocks = [block for request in requests for block in request.blocks]
        error: BaseException | None = None
        found: list[bytes] = []
        try:
            with self._device.current():
                for first in range(0, len(blocks), LAUNCH_BLOCKS):
                    found += self._batch(blocks[first : first + LAUNCH_BLOCKS])
        except BaseException as caught:
            error = caught
            raise
        finally:
            for request in requests:
                request.done, request.error = True, error
                request.digests, found = found[: len(request.blocks)], found[len(request.blocks) :]

    def _batch(self, blocks: Sequence[Block]) -> list[bytes]:
        driver, stream = self._device.driver, self._stream.handle
        count = len(blocks)
        addresses, sizes = zip(*blocks, strict=True)
        struct.pack_into(f"<{2 * count}Q", self._view, 0, *addresses, *sizes)
        inputs = self._lists.address
        lengths, digests = inputs + 8 * count, inputs + _LIST_BYTES
        word = digests + DIGEST_BYTES * LAUNCH_BLOCKS  # of a comparison, which says nothing here
        driver.copy_htod(inputs, self._host.address, 16 * count, stream)
        places = (inputs, lengths, digests, digests, word, self._chains.address)
        self.kernel.launch(count, places, stream)
        driver.copy_dtoh(self._host.address + _LIST_BYTES, digests, DIGEST_BYTES * count, stream)
        driver.event_record(self._hashed.handle, stream)
        driver.event_synchronize(self._hashed.handle)  # asleep, as no wait for a stream is
        found = self._view[_LIST_BYTES : _LIST_BYTES + DIGEST_BYTES * count]
        return [bytes(found[at : at + DIGEST_BYTES]) for at in range(0, len(found), DIGEST_BYTES)]

    def close(self) -> None:
        """Free the stream and the memory. Idempotent."""
        self._view = memoryview(b"")
        self._ends.close()


class _DigestRequest:
    __slots__ = ("blocks", "digests", "done", "error")

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.digests: list[bytes] = []
        self.done = False
        self.error: BaseException | None = None


class DeviceHasher:
    """Hashes the blocks of one read in device memory.

    `views` are the blocks, one for each; `digests` computes their digests
    (`BlockDigester.digests`). Bytes announced by `landed` are in place on the device, not merely
    under way. Hashing begins with `block_digests`, since the blocks of a read are one batch.
    """

    __slots__ = ("_blocks", "_digests")

    def __init__(
        self, views: Sequence[DeviceView], digests: Callable[[Sequence[Block]], list[bytes]]
    ) -> None:
        self._blocks = [(view.address, len(view)) for view in views]
        self._digests = digests

    def landed(self, payload_nbytes: int) -> None:
        """Do nothing: a launch for some of the bytes would cost more than it saves."""

    def block_digests(self) -> bytes:
        """Return the digests of all blocks, concatenated. Raises CudaError, LocalError."""
        return b"".join(self._digests(self._blocks))
