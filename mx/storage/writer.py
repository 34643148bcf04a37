"""Writes a checkpoint beside its target while layers arrive, and renames it in one step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from mx.core.layout import TensorSpec, permuted_stride
from mx.core.packaging import DIGESTS
from mx.core.types import Companion, Layout, Manifest, PackagedFile, Packaging, Tensor
from mx.errors import OutputError
from mx.storage.header import header_bytes
from mx.storage.journal import Records, read
from mx.storage.osfile import close_file
from mx.storage.row_major import row_major
from mx.storage.staged_writer import StagedWriter
from mx.storage.staging import JOURNAL
from mx.views import HostView, as_bytes, host_view

#: The folder beside `files` in which companions are written.
_COMPANIONS = "companions"
#: The most that is recorded on a folder: some file systems take 4 KiB of attributes in all.
_RECORD_BYTES = 3000


def default_packaging(layout: Layout) -> Packaging:
    """Return the packaging of tensors that come from no checkpoint: one file, in execution order.

    Its metadata names ties as safetensors.torch.save_model does. Other aliases (slices,
    transposes) are views that no checkpoint holds, and are left out.
    """
    metadata = {"format": "pt"}
    forms = {tensor.name: (tensor.shape, tensor.stride) for tensor in layout.tensors}
    for alias in layout.aliases:
        form = (alias.shape, permuted_stride(alias.shape, alias.stride))
        if alias.offset_bytes == 0 and form == forms[alias.target]:
            metadata[alias.name] = alias.target
    names = tuple(tensor.name for tensor in layout.tensors)
    return Packaging((PackagedFile("model.safetensors", metadata, names),))


class CheckpointWriter(StagedWriter):
    """Writes the checkpoint that `manifest` packages as the folder `out`.

    Files hold tensors in row-major order, as safetensors does: a permuted tensor is copied to that
    order on the way, and back when its layer is read back.

    Nothing appears at `out` before `commit`; `abort`, and every error raised here, leave nothing
    behind. With `keep` they leave the layers that were written, if any (`kept`), for the next
    writer with `keep` of the same manifest and `out`. `claimed` are the layers that an earlier
    writer left, according to its journal. The caller checks them (`read_layer`) and reports which
    are right (`have_layer`); those need not be written again.

    With `digests_nbytes` there is room for those beside the weights, which `write_digests` writes.

    `companions` are written by others, each into its `companion_folder`, before `commit`.

    The constructor reserves the space of all files. `write_layer`, `write_side_page` and
    `finish_side_file` may be called from several threads; `commit` once those have returned,
    `abort` at any time. Also a context manager, which aborts unless committed.

    Raises:
        ConfigError: `out` is in use, or can't be a folder.
        CapacityError: The disk is too small.
        OutputError: Writing fails.
    """

    #: What the first tensor of each file begins at a multiple of.
    header_alignment_bytes = 8

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        *,
        keep: bool = False,
        companions: Sequence[Companion] = (),
        digests_nbytes: int = 0,
    ) -> None:
        packaging = manifest.packaging
        if not packaging.files:  # the source served tensors, not a checkpoint
            packaging = default_packaging(manifest.layout)
        tensor_files = packaging._replace(companions=manifest.packaging.companions).tensor_files
        super().__init__(out, manifest.packaging.side_files, tensor_files)
        self.companions = companions
        self._manifest = manifest
        self._packaging = packaging
        self._digests_nbytes = digests_nbytes
        self._fds: list[int] = []
        # Per layer: its tensors, without the empty ones, with descriptor and offset in the file.
        self._pieces: list[list[tuple[Tensor, int, int]]] = [[] for _ in manifest.layout.layers]
        self._records: Records | None = None
        self.written_nbytes = 0  # of tensors, with what an earlier run left and is right
        self.claimed: frozenset[int] = frozenset()
        with self._using():
            self._create_files(keep=keep)
        self._layers_left = {index for index, pieces in enumerate(self._pieces) if pieces}
        self.layers = len(self._layers_left)

    def companion_folder(self, number: int) -> Path:
        """Return the folder in which a companion is written: one file, under its own name. Raises
        as the class: another run may have taken all of it over."""
        with self._using():
            return self.folder / _COMPANIONS / str(number)

    @property
    def kept(self) -> int:
        """How many layers another run can resume from if this one ends without `commit`."""
        return 0 if self._records is None else len(self._records.layers)

    def read_layer(self, index: int, layer_view: HostView) -> None:
        """Read a claimed or written layer back from disk, as far as possible.

        Args:
            index: The layer's index.
            layer_view: The layer's space, of its `nbytes` bytes or more. Bytes that can't be read
                stay as they are.
        """
        with self._using(), as_bytes(layer_view) as layer:
            for tensor, fd, position in self._pieces[index]:
                with (
                    host_view(layer[tensor.offset : tensor.offset + tensor.nbytes]) as stored,
                    closing(row_major(tensor, stored, back=True)) as pieces,
                ):
                    for at, rows in pieces:
                        if _read_some(fd, rows, position + at) < len(rows):
                            break

    def have_layer(self, index: int, right: bool) -> None:
        """Record whether a claimed layer is right; one that is wrong has to be written again."""
        with self._lock:
            if right:
                self._layers_left.discard(index)
                self.written_nbytes += sum(tensor.nbytes for tensor, *_ in self._pieces[index])
            elif self._records is not None:
                self._records.layers.discard(index)

    def write_layer(self, index: int, layer_view: HostView) -> None:
        """Write a layer's tensors to their files.

        Args:
            index: The layer's index.
            layer_view: The layer's space, of its `nbytes` bytes or more. It is only read from, and
                only until this returns.

        Raises:
            MxError: As the class.
        """
        if index not in self._layers_left:
            return
        with self._using(), as_bytes(layer_view) as layer:
            if len(layer) < self._manifest.layout.layers[index].nbytes:
                raise ValueError(f"layer {index} is larger than the view of it")
            for tensor, fd, position in self._pieces[index]:
                with (
                    host_view(layer[tensor.offset : tensor.offset + tensor.nbytes]) as stored,
                    closing(row_major(tensor, stored)) as pieces,
                ):
                    for at, rows in pieces:
                        if self._ended:
                            raise OutputError(f"{self._staging.out} was abandoned")
                        _write(fd, rows, position + at)
                        with self._lock:
                            self.written_nbytes += len(rows)
            if self._records is not None:
                self._records.wrote(index, {fd for _, fd, _ in self._pieces[index]})
        with self._lock:
            self._layers_left.discard(index)

    def write_digests(self, parts: Iterable[bytes]) -> None:
        """Write the file of digests, if there is room for one, before `commit`. Raises as the
        class."""
        if self._digests_nbytes:
            with self._using(), open(self._staging.open_file(DIGESTS, os.O_WRONLY), "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())

    def _missing(self) -> str:
        if not self._layers_left and not self._side_files:
            return ""
        return f"{len(self._layers_left)} layers and {len(self._side_files)} side files"

    def _sync(self) -> None:
        for fd in self._fds:
            os.fsync(fd)
        for number, companion in enumerate(self.companions):
            name = companion.path.rpartition("/")[2]
            self._staging.move_in(f"{_COMPANIONS}/{number}/{name}", companion.path)
        ref, sides = self._manifest.ref, self._manifest.packaging.side_files
        whole = len(self.companions) == len(self._manifest.packaging.companions)
        said = [f"{(ref.pin if whole else ref.identity).hex()} {ref.identity.hex()}"]
        said += [f"{side.digest[:8].hex()} {side.path}" for side in sides]
        said += [f"{each.identity[:8].hex()} {each.path}" for each in self.companions]
        text = "\n".join(said)
        self._staging.record(text if len(text.encode()) <= _RECORD_BYTES else said[0])
        self._staging.record_tensors(self._manifest)

    def _published(self) -> None:
        records, self._records = self._records, None
        if records is not None:
            records.close()

    def _clean_up(self) -> None:
        if self._records is not None:
            self._records.close()
        self._close_files()
        if self.kept:
            self._staging.release()
        else:
            self._staging.discard()

    def _create_files(self, *, keep: bool) -> None:
        tensors = {tensor.name: tensor for tensor in self._manifest.layout.tensors}
        plans = []
        for file in self._packaging.files:
            members = [tensors[name] for name in file.tensors]
            specs = [TensorSpec(t.name, t.dtype, t.shape) for t in members]
            header = header_bytes(specs, file.metadata, self.header_alignment_bytes)
            plans.append((file.path, header, members, len(header) + sum(t.nbytes for t in members)))
        ref, folder = self._manifest.ref, self._staging.fd
        claimed = read(JOURNAL, ref, len(self._pieces), folder=folder) if keep else None
        if claimed:  # of a tensor in two files only one copy would be read back and checked
            seen = Counter(name for file in self._packaging.files for name in file.tensors)
            claimed -= {tensors[name].layer for name, times in seen.items() if times > 1}
        if claimed and self._staging.left_over({path: nbytes for path, *_, nbytes in plans}):
            self.claimed, flags = frozenset(claimed), 0
        else:
            self._staging.clear()
            flags = os.O_CREAT | os.O_EXCL
        if keep:
            self._records = Records(JOURNAL, ref, self.claimed, folder=folder)
        wanted = sum(nbytes for *_, nbytes in plans)
        wanted += sum(side.nbytes for side in self._side_files.values())
        wanted += self._digests_nbytes
        if not self.claimed:  # else some of them may be there
            wanted += sum(companion.nbytes for companion in self.companions)
        self._staging.require(wanted)
        self._staging.warn()
        flags |= os.O_RDWR
        if self._digests_nbytes:
            fd = self._staging.open_file(DIGESTS, flags | os.O_CREAT)
            self._fds.append(fd)
            os.posix_fallocate(fd, 0, self._digests_nbytes)
        for path, header, members, nbytes in plans:
            fd = self._staging.open_file(path, flags)
            self._fds.append(fd)
            # Reserve the space, so that a full disk is reported now and not later.
            os.posix_fallocate(fd, 0, nbytes)
            position = 0
            while position < len(header):
                position += os.pwrite(fd, header[position:], position)
            for tensor in members:
                if tensor.nbytes:
                    self._pieces[tensor.layer].append((tensor, fd, position))
                position += tensor.nbytes

    def _close_files(self) -> None:
        while self._fds:
            close_file(self._fds.pop())


def _read_some(fd: int, view: memoryview, position: int) -> int:
    """Read into `view` as far as possible. Returns the number of bytes."""
    done = 0
    while done < len(view):
        try:
            with view[done:] as rest:
                got = os.preadv(fd, [rest], position + done)
        except OSError:
            break
        if not got:
            break
        done += got
    return done


def _write(fd: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.pwrite(fd, rest, position + done)
