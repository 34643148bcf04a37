"""The progress of a pull: the snapshot that it gives its caller. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from mx.core.types import Layout
from mx.units import count, format_bytes


class LayerProgress(NamedTuple):
    name: str
    nbytes: int
    done_nbytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. Before the manifest is known it has no layers, and counts only bytes read from
    disk. `sources` are the HOST:PORT of the sources in use; `bytes_written` counts what a pull with
    `out` has written there, to make durable at the end."""

    bytes_done: int = 0
    bytes_total: int = 0
    layers_ready: int = 0
    layers_total: int = 0
    layers: tuple[LayerProgress, ...] = ()
    phase: str = "resolving"
    sources: tuple[str, ...] = ()
    retries: int = 0
    bytes_written: int = 0


def summary(progress: Progress) -> str:
    """Return a line like "reading, 3/26 layers, 72.1 MB of 633 MB"."""
    return (
        f"{progress.phase}, {progress.layers_ready}/{count(progress.layers_total, 'layer')}, "
        f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
    )


def progress_of(
    layout: Layout,
    done_nbytes: Sequence[int] | None,
    is_ready: Callable[[int], bool],
    phase: str,
    sources: Iterable[str] = (),
    retries: int = 0,
    layer_nbytes: Sequence[int] | None = None,
) -> Progress:
    """Return a snapshot.

    Args:
        layout: The model's.
        done_nbytes: The bytes that have landed, by layer; None: a layer counts whole once it is
            ready, and before not at all.
        is_ready: Returns True for a layer that is ready.
        phase: What the pull does now, for people.
        sources: The sources in use; repeated ones count once.
        retries: How often a chunk was read again.
        layer_nbytes: The bytes to move for each layer; None: those of its tensors.
    """
    layers = []
    sizes = layout.layer_nbytes if layer_nbytes is None else layer_nbytes
    for layer, nbytes in zip(layout.layers, sizes, strict=True):
        ready = is_ready(layer.index)
        done = nbytes if ready else 0
        if done_nbytes is not None:
            done = done_nbytes[layer.index]
        layers.append(LayerProgress(layer.name, nbytes, done, ready))
    return Progress(
        sum(map(attrgetter("done_nbytes"), layers)),
        sum(sizes),
        sum(map(attrgetter("ready"), layers)),
        len(layers),
        tuple(layers),
        phase,
        tuple(dict.fromkeys(sources)),
        retries,
    )
