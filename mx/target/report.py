"""What a pull reports: layer events, progress, and the report at its end."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mx.core.types import Layout
from mx.errors import ClosedError, DigestError, IncompleteError, LocalError, MxError
from mx.target.reads import Connection
from mx.units import count, format_bytes

if TYPE_CHECKING:
    import torch


class VerifiedBy(enum.Enum):
    """Who checked a layer's bytes: this process by their digests, this process against the
    identity too (`strong`), or the source that sealed the memory that was attached."""

    DIGEST = "digest"
    STRONG = "strong"
    SOURCE = "source"


def no_tensors(layer: int) -> dict[str, torch.Tensor]:
    """Raise ClosedError: the event's pull is gone."""
    raise ClosedError(f"the pull of layer {layer} is gone, and its tensors with it")


TensorsOf = Callable[[int], "dict[str, torch.Tensor]"]


@dataclass(frozen=True, slots=True)
class LayerEvent:
    """A layer is ready: every byte landed and verified. `at_s` counts from the pull's start."""

    index: int
    name: str
    nbytes: int
    verified_by: str
    at_s: float
    tensors_of: TensorsOf = field(default=no_tensors, repr=False, compare=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the layer's tensors by name, as `Pull.layer_state_dict` does.

        Returns:
            Views of the pull's memory, which they keep alive; no copy.

        Raises:
            ClosedError: The pull was closed, or is gone.
            ConfigError: torch is not installed.
        """
        return self.tensors_of(self.index)


@dataclass(frozen=True, slots=True)
class LayerProgress:
    name: str
    nbytes: int
    done_nbytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. Before the manifest is known it has no layers, and counts only bytes read from
    disk. `sources` are the HOST:PORT of the sources in use."""

    bytes_done: int = 0
    bytes_total: int = 0
    layers_ready: int = 0
    layers_total: int = 0
    layers: tuple[LayerProgress, ...] = ()
    phase: str = "resolving"
    sources: tuple[str, ...] = ()
    retries: int = 0


def summary(progress: Progress) -> str:
    """Return a line like "reading, 3/26 layers, 72.1 MB of 633 MB"."""
    return (
        f"{progress.phase}, {progress.layers_ready}/{count(progress.layers_total, 'layer')}, "
        f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
    )


class Reading(Protocol):
    """The progress of a transfer: `mx.target.transfer.Transfer`."""

    @property
    def retries(self) -> int: ...
    @property
    def connections(self) -> Sequence[Connection]: ...
    def progress(self) -> tuple[int, list[int]]: ...


@dataclass(frozen=True, slots=True)
class PathReport:
    """What came over one path; if `attached`, `bytes` were mapped, and none was moved. `rail`
    names the pair of interfaces, where the path is one of several."""

    transport: str
    source: str
    bytes: int
    seconds: float
    attached: bool = False
    rail: str = ""


@dataclass(frozen=True, slots=True)
class LeftSource:
    """A source (HOST:PORT) that was not used to the end, and why."""

    source: str
    reason: str


@dataclass
class PullReport:
    """How a pull went; `to_json` is what `mx pull --json` prints."""

    model: str
    manifest: str
    bytes: int
    seconds: float
    first_layer_s: float
    layers: int
    verified: str
    paths: list[PathReport] = field(default_factory=list)
    retries: int = 0
    left: list[LeftSource] = field(default_factory=list)
    fallback: str | None = None
    control_s: float = 0.0

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "manifest": self.manifest,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "gb_per_s": round(self.gb_per_s, 3),
            "first_layer_s": round(self.first_layer_s, 6),
            "layers": self.layers,
            "verified": self.verified,
            "paths": [
                {
                    "transport": path.transport + ("-attach" if path.attached else ""),
                    "source": path.source,
                    "bytes": path.bytes,
                    "seconds": round(path.seconds, 6),
                }
                | ({"rail": path.rail} if path.rail else {})
                for path in self.paths
            ],
            "retries": self.retries,
            "left": [{"source": each.source, "reason": each.reason} for each in self.left],
            "fallback": self.fallback,
            "control_s": round(self.control_s, 6),
        }


def progress_of(
    layout: Layout, reading: Reading | None, is_ready: Callable[[int], bool], phase: str
) -> Progress:
    """Return a snapshot. Without a transfer (`reading`) a layer counts whole or not at all."""
    done = None if reading is None else reading.progress()[1]
    connections = () if reading is None else reading.connections
    layers = []
    for layer in layout.layers:
        nbytes = sum(length for _, length in layer.runs)
        ready = is_ready(layer.index)
        so_far = done[layer.index] if done is not None else nbytes if ready else 0
        layers.append(LayerProgress(layer.name, nbytes, so_far, ready))
    return Progress(
        sum(layer.done_nbytes for layer in layers),
        layout.payload_nbytes,
        sum(layer.ready for layer in layers),
        len(layers),
        tuple(layers),
        phase,
        tuple(dict.fromkeys(connection.peer for connection in connections if not connection.lost)),
        0 if reading is None else reading.retries,
    )


def unexpected(error: BaseException) -> MxError:
    """Return any exception as an MxError, with the original as its cause."""
    if isinstance(error, MxError):
        return error
    found: MxError
    if isinstance(error, asyncio.CancelledError):
        found = ClosedError("the pull was closed before it was complete")
    elif isinstance(error, OSError | MemoryError):
        found = LocalError(f"this process could not go on: {error or type(error).__name__}")
    else:
        found = LocalError(
            f"unexpected {type(error).__name__}: {error}",
            hint="if it comes from no code of yours, it is a defect: please report the traceback",
        )
    found.__cause__ = error
    return found


def again(error: MxError, how: str) -> MxError:
    """Add to the error's hint how to go on from what is kept, and return it."""
    rest = error.hint.removeprefix("start the pull again").removeprefix("; ")
    error.hint = "; ".join(filter(None, [how, rest])) if how else error.hint
    return error


def final_error(
    model: str, layout: Layout, layers_ready: int, bytes_done: int, causes: Sequence[MxError]
) -> MxError:
    """Return the error of a pull that ran out of sources: how far it came, and each cause once."""
    said = "; ".join(dict.fromkeys(cause.message for cause in causes)) or "no source was left"
    far = (
        f"pull of {model} stopped after {layers_ready} of {count(len(layout.layers), 'layer')}, "
        f"{format_bytes(bytes_done)} of {format_bytes(layout.payload_nbytes)}: {said}"
    )
    if causes and isinstance(causes[-1], DigestError):
        return DigestError(far, peer=causes[-1].peer, hint=causes[-1].hint)
    return IncompleteError(far, hint="start the pull again; mx sources shows who is left")
