"""Compares a few bytes of what a peer serves with those of the engine's own folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from mx.core.packaging import INDEX_SUFFIX, TENSOR_SUFFIX
from mx.engines.replica.tensors import plain
from mx.errors import IntegrityError
from mx.memory.tensors import torch_form
from mx.storage.own_weights import OwnWeights, Sample


class Sampler:
    """Compares tensors with those of a folder, whose files are open. `close` it."""

    def __init__(self, own: OwnWeights) -> None:
        """
        Args:
            own: The folder's.
        """
        self._own = own
        self.compared = 0

    @classmethod
    def of(cls, path: Path | None) -> Sampler | None:
        """Return a sampler of a file or folder; None if it has no safetensors to compare with.

        Args:
            path: The path; None for no folder.

        Raises:
            ConfigError, CheckpointError, LocalError: As `OwnWeights`.
        """
        if path is None:
            return None
        files = path.iterdir() if path.is_dir() else [path]
        if not any(each.name.endswith((TENSOR_SUFFIX, INDEX_SUFFIX)) for each in files):
            return None
        return cls(OwnWeights(path))

    def close(self) -> None:
        """Close the files."""
        self._own.close()

    def passing(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, checkpoint: bool, processed: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors, each after a sample of it was compared.

        Args:
            tensors: What a peer serves, by name.
            checkpoint: Whether they are the checkpoint's own. Others, of which an engine has made
                its state, are compared only if name, dtype and shape are the checkpoint's.
            processed: Whether the engine may have put their elements in another order. Then only
                those of one dimension, and embeddings, are compared.

        Raises:
            IntegrityError: One differs.
            LocalError, CheckpointError: The folder's can't be read.
        """
        for name, tensor in tensors:
            sample = self._own.sample(name)
            if sample is not None:
                ordered = not processed or tensor.dim() < 2 or "embed" in name
                if checkpoint or (_same_kind(sample, tensor) and ordered):
                    self._compare(name, sample, tensor)
            yield name, tensor

    def _compare(self, name: str, sample: Sample, tensor: torch.Tensor) -> None:
        if not _same_kind(sample, tensor) or _bytes_at(tensor, sample) != sample.data:
            raise IntegrityError(
                f"{name} of the peer is not what {self._own.path} has",
                hint="the folder has other weights: name their own model, or remove them to take "
                "the peer's",
            )
        self.compared += 1


def _same_kind(sample: Sample, tensor: torch.Tensor) -> bool:
    return (tensor.dtype, tuple(tensor.shape)) == torch_form(sample.dtype, sample.shape)


def _bytes_at(tensor: torch.Tensor, sample: Sample) -> bytes:
    """Return the bytes of a tensor where the sample was taken."""
    if not sample.data:
        return b""
    width = tensor.element_size()
    first, last = sample.offset // width, (sample.offset + len(sample.data) - 1) // width + 1
    flat = plain(tensor).reshape(-1)[first:last].cpu().contiguous()
    data = bytes(flat.view(torch.uint8).numpy())
    begin = sample.offset - first * width
    return data[begin : begin + len(sample.data)]
