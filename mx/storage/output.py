"""Writes a pulled checkpoint while it arrives."""

from __future__ import annotations

import contextlib
import mmap
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from mx import packs
from mx.core.types import Companion, Manifest
from mx.errors import MxError
from mx.memory.device import HostReader
from mx.memory.verify import wrong_tensors
from mx.storage.load import hash_opened
from mx.storage.safetensors import open_checkpoint
from mx.storage.writer import CheckpointWriter
from mx.threads import Threads
from mx.transport import View
from mx.views import HostView, device_of, host_bytes


class Output:
    """The checkpoint of a pull with `out`. One thread writes the layers as they become ready (from
    a GPU copied to the host first, one at a time); `finish` commits.

    Until then everything is in a folder beside `out`. `abort` removes it; with `keep` it leaves the
    layers that were written, if any, for a later pull to go on from.
    """

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        on_error: Callable[[BaseException], None],
        page: Callable[[int], bytes | None],
        *,
        keep: bool,
        companions: Sequence[Companion] = (),
        writer: Callable[..., CheckpointWriter] | None = None,
    ) -> None:
        """
        Args:
            out: The folder to make.
            manifest: The model's manifest.
            on_error: Called on the writing thread with an exception, which ends the pull.
            page: Returns the page of a layer, which was verified by it; None if it is not known.
            keep: Whether `abort` keeps the written layers.
            companions: As for `CheckpointWriter`.
            writer: Called as `CheckpointWriter` in its place, to write another form of the model.

        Raises:
            MxError: Errors of `CheckpointWriter`.
        """
        make = packs.optional("mx.snapshots.digests:WrittenDigests")
        self._digests = None if make is None else make(manifest, page, bool(writer))
        nbytes = 0 if self._digests is None else self._digests.nbytes
        self._writer = (writer or CheckpointWriter)(
            out, manifest, keep=keep, companions=companions, digests_nbytes=nbytes
        )
        self._manifest = manifest
        self._on_error = on_error
        self._reader = HostReader()
        self._pool = Threads(1, "mx-out")
        self._futures: list[Future[None]] = []
        self._lock = threading.Lock()

    @property
    def folder(self) -> str:
        """The folder in which everything is until `finish`."""
        return str(self._writer.folder)

    @property
    def written_nbytes(self) -> int:
        """The bytes of tensors that are in the folder's files."""
        return self._writer.written_nbytes

    def companion_folder(self, number: int) -> Path | None:
        """Return the folder to write a companion to, which is not there, or is left for the same
        pull to go on from; None if all of it is there, and right. Blocks until the main weights are
        written, and raises as `finish`."""
        self._wait_written()
        folder = self._writer.companion_folder(number)
        if folder.exists():
            with contextlib.suppress(MxError):
                found = hash_opened(open_checkpoint(folder), threads=2)
                if found.manifest.ref.pin.hex() == self._writer.companions[number].pin:
                    return None
            shutil.rmtree(folder)
        return folder

    @property
    def left(self) -> list[int]:
        """The layers that an earlier run recorded as written, in execution order."""
        return sorted(self._writer.claimed)

    def read_back(self, layer: int, view: View) -> list[int]:
        """Read a layer of `left` into its place, and hash it in host memory. Blocks.

        Args:
            layer: The layer's index.
            view: The layer's space.

        Returns:
            The layer's chunks all of whose tensors are right. A tensor that a chunk holds only in
            part counts as a whole: its root tells nothing about the parts.
        """
        on_gpu = device_of(view) != "cpu"
        here: HostView
        if on_gpu:  # a layer may be empty, and a mapping not
            here = memoryview(mmap.mmap(-1, max(1, len(view))))[: len(view)]
        else:
            here = host_bytes(view)
        self._writer.read_layer(layer, here)
        grid, extents = self._manifest.grid, self._manifest.layout.layers[layer].extents
        wrong: set[int] = set()
        for number in wrong_tensors(self._manifest, layer, here, self._reader):
            offset, nbytes = extents[number]
            wrong.update(grid.chunks_of(layer, offset, offset + nbytes))
        if on_gpu:
            assert isinstance(here, memoryview)
            self._reader.write(view, here)
        self._writer.have_layer(layer, not wrong)
        return [index for index in grid.of_layer(layer) if index not in wrong]

    def layer_ready(self, layer: int, view: View) -> None:
        """Queue a layer to be written. `view` must stay as it is until `finish` or `abort`."""
        with self._lock:
            self._futures.append(self._pool.submit(self._write, layer, view))

    def _write(self, layer: int, view: View) -> None:
        try:
            here = self._reader.whole(view)
            self._writer.write_layer(layer, here)
            if self._digests is not None:
                self._digests.layer(layer, here)
        except BaseException as error:
            self._on_error(error)
            raise

    def _wait_written(self) -> None:
        for future in self._futures:
            future.result()

    def side_page(self, digest: bytes, offset: int, data: bytes) -> None:
        """Write some bytes to each side file with this digest. Blocks."""
        for side in self._manifest.packaging.side_files:
            if side.digest == digest:
                self._writer.write_side_page(side.path, offset, data)

    def finish(self) -> None:
        """Wait for the writes, check the side files, and commit. Blocks.

        Raises:
            OutputError: The file system refuses.
            CapacityError: The disk is full.
            IntegrityError: A side file may not be written.
        """
        self._wait_written()
        self._reader.close()
        for side in self._manifest.packaging.side_files:
            self._writer.finish_side_file(side.path)
        if self._digests is not None:
            self._writer.write_digests(self._digests.data())
        self._pool.shutdown()
        self._writer.commit()

    def abort(self) -> str:
        """End without a commit. Blocks. Returns how to go on from the layers that are kept; "" if
        none are."""
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()
        self._futures.clear()
        self._writer.abort()
        if not self._writer.kept:
            return ""
        return (
            f"run the same command again to go on from {self._writer.kept} of "
            f"{self._writer.layers} layers"
        )
