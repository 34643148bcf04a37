"""Writing a pulled checkpoint while it arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mx.core.types import Manifest
from mx.errors import MxError
from mx.memory.device import HostReader
from mx.puller.report import Telling
from mx.storage.writer import CheckpointWriter
from mx.transport import Span


class Output:
    """`--out`: layers are written by one thread as they become ready (copied back from a GPU
    first, one at a time); `finish` commits.

    Everything is beside the target until then; `abort` leaves nothing behind.
    """

    def __init__(self, out: Path, manifest: Manifest, on_error: Callable[[MxError], None]) -> None:
        self._writer = CheckpointWriter(out, manifest)
        self._on_error = on_error
        self._reader = HostReader()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mx-out")
        self._futures: list[Future[None]] = []
        self._lock = threading.Lock()

    def layer_ready(self, layer: int, view: Span) -> None:
        with self._lock:
            self._futures.append(self._pool.submit(self._write, layer, view))

    def _write(self, layer: int, view: Span) -> None:
        with Telling(self._on_error):
            self._writer.write_layer(layer, self._reader.whole(view))

    def finish(self, side_files: dict[str, bytes]) -> None:
        """Wait for the writes, add the side files, commit. Raises OutputError or CapacityError."""
        for future in self._futures:
            future.result()
        self._reader.close()
        for path, data in side_files.items():
            self._writer.write_side_file(path, data)
        self._pool.shutdown()
        self._writer.commit()

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()
        self._futures.clear()
        self._writer.abort()
