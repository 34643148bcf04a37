"""What a pull reports: layer events, and the report or the error at its end."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mx.core.reasons import PathReason
from mx.core.types import Layout, ModelKey
from mx.errors import (
    ClosedError,
    DigestError,
    IncompleteError,
    LocalError,
    MxError,
    NoSourceError,
    PeerUntrustedError,
    SourceChangedError,
    StaleGenerationError,
    SupersededError,
)
from mx.text import listed
from mx.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

    from mx.core.notes import Notes
    from mx.views import TensorView


class VerifiedBy(enum.Enum):
    """Who checked a layer's bytes, and how: this process by blake3 against the identity (`digest`;
    `strong` if no shortcut was allowed), also where a GPU of this user's other process holds them,
    behind the copies out of it (`gpu`), or by xxh3_128 against what a process of this user says
    (`xxh3`); or the process of this user that sealed the memory that was attached (`source`); or,
    for some of the layer, another rank on this host that has read it for both (`rank`)."""

    DIGEST = "digest"
    STRONG = "strong"
    GPU = "gpu"
    SHORTCUT = "xxh3"
    SOURCE = "source"
    RANK = "rank"


def no_edition(layer: int) -> Any:
    """Raise ClosedError: the event's pull is gone."""
    raise ClosedError(f"the pull of layer {layer} is gone, and its tensors with it")


#: Returns the `mx.fetching.edition.Edition` of a ready layer, which this module does not import.
EditionOf = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class LayerEvent:
    """A layer is ready: every byte landed and verified. `at_s` counts from the pull's start.
    `revision` is the model's: a pull that follows it reports a layer again after a change."""

    index: int
    name: str
    nbytes: int
    verified_by: str
    at_s: float
    revision: str = ""
    edition_of: EditionOf = field(default=no_edition, repr=False, compare=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the layer's tensors by name, as `Pull.layer_state_dict` does.

        Returns:
            Views of the pull's memory, which they keep alive; no copy. They keep their bytes
            whatever becomes of the pull, unless it fills memory of the caller's (`into`).

        Raises:
            RevisionChangedError: The pull has gone over to a newer revision (`follow`), of which
                the layer is reported again.
            ClosedError: The pull was closed, or is gone.
            MxError: The error that ended the pull.
            ConfigError: torch is not installed.
        """
        found: dict[str, torch.Tensor] = self.edition_of(self.index).tensors(self.index)
        return found

    def views(self) -> dict[str, TensorView]:
        """Return the layer's tensors by name, and those that are tied to them, without torch.

        Returns:
            Read-only views of the pull's memory, on the host or a GPU, with dtype, shape and
            strides; no copy. They keep that memory and its bytes, as those of `tensors` do.

        Raises:
            RevisionChangedError: As `tensors`.
            ClosedError: As `tensors`.
            MxError: The error that ended the pull.
        """
        found: dict[str, TensorView] = self.edition_of(self.index).views(self.index)
        return found


class PathReport(NamedTuple):
    """What came over one path; if `attached`, `bytes` were mapped, and none was moved. `rail`
    names the pair of interfaces, where the path is one of several; `pid` the process whose memory
    was attached; `detail` says how bytes came from a disk into a GPU, or what made the path slower
    than it could be."""

    transport: str
    source: str
    bytes: int
    seconds: float
    attached: bool = False
    rail: str = ""
    pid: int = 0
    detail: str = ""

    @property
    def given(self) -> bool:
        """True if another rank on this host moved these bytes."""
        return self.transport == "rank"


class LeftSource(NamedTuple):
    """A source (HOST:PORT) that was not used to the end, and why."""

    source: str
    reason: PathReason


@dataclass(frozen=True, slots=True)
class FilesReport:
    """The side files of a pull of files only. `source` is the endpoint (HOST:PORT) of the source
    that served them, or the folder on disk."""

    count: int
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class CompanionReport:
    """A further tensor file that was pulled to `out` beside the main weights. `sources` (HOST:PORT,
    or a store's place) are empty if an earlier pull had left it there."""

    path: str
    bytes: int
    pin: str
    seconds: float
    sources: list[str] = field(default_factory=list)


_Document = bytes  # of a report `bytes` is a field

#: Outcomes of a step, see `StepReport`.
USED, PARTLY, FAILED = "used", "partly", "failed"
SKIPPED, UNUSED = "skipped", "not needed"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step of the chain came to: "attach" (memory of this host), "host" (peers on it),
    "peers" (elsewhere), "snapshot", "disk", "hub" or "objects".

    `outcome` is "used" (the pull was complete with it), "partly" (it gave bytes, and others the
    rest), "failed", "skipped" (there was nothing to try, see `reason`) or "not needed". `bytes` are
    those that it gave, attached ones included.
    """

    step: str
    outcome: str
    reason: str = ""
    bytes: int = 0


class StageReport(NamedTuple):
    """What a pull spent on one stage of reading from a drive, or another store: "open" (files and
    headers), "read", "place" (copies to where bytes belong), "hash", "upload" (to a GPU) or "wait"
    (for reads to be asked for, and all else). `seconds` are those of all its threads together, and
    `bytes` what they moved then."""

    drive: str
    stage: str
    seconds: float
    bytes: int

    @property
    def gb_per_s(self) -> float | None:
        """What one thread moved; None where nothing was."""
        return round(self.bytes / self.seconds / 1e9, 3) if self.bytes and self.seconds else None


@dataclass(repr=False)
class PullReport:
    """How a pull went; `to_json` is what `mx pull --json` prints.

    `bytes` are those of the tensors that were pulled; `seconds` end when the caller has what he
    asked for: every layer ready and, with `out`, the folder in its place. `moved_bytes` is None, or
    for a pull of some tensors the bytes of all blocks that hold some of theirs, which were moved:
    without those that other ranks on this host have moved (paths whose transport is "rank").

    `identity` is that of the weights. `pin` covers their files too, if there are any, else
    it is the identity; both in hexadecimal digits. Both are "" for files from a disk alone, whose
    weights are not read. `bytes`, `layers` and `paths` count weights: a pull of files only has
    none, and has `files`. `fallback` is the step ("disk", "hub" …) with which a pull was
    complete that its peers did not complete. `defined_by` is that step if nothing but what it holds
    says which weights these are: neither a pin nor any source. `steps` is empty but for a pull from
    "auto". `newest` is what the name meant, if that could not be obtained whole and `model` is an
    older revision (`allow_older`). `notes` is what the source says of its folder, see `folder`.
    `companions` are those that were written. `stages` is empty if no store was read.
    """

    model: str
    identity: str
    pin: str
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
    files: FilesReport | None = None
    moved_bytes: int | None = None
    defined_by: str = ""
    steps: list[StepReport] = field(default_factory=list)
    newest: str = ""
    notes: _Document = b""
    companions: list[CompanionReport] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)

    @property
    def folder(self) -> Notes:
        """What the source says of the folder that the files are from: which it leaves out."""
        from mx.core.notes import decode  # most pulls have nothing to read

        return decode(self.notes)

    @property
    def pin_covers_files(self) -> bool:
        """True if the pin covers files, False if there are none."""
        return self.pin != self.identity

    @property
    def gb_per_s(self) -> float | None:
        """The rate; None where nothing was moved: memory was attached, or there are no weights."""
        if self.attached or not self.bytes or self.seconds <= 0:
            return None
        return self.bytes / self.seconds / 1e9

    @property
    def attached(self) -> bool:
        """True if all of it is memory of a process on this host, of which nothing was copied."""
        return bool(self.paths) and all(path.attached for path in self.paths)

    @property
    def verdict(self) -> str:
        """Who vouches for the bytes, in words."""
        if self.defined_by or (self.files is not None and not self.identity):
            return "compared with nothing (no pin)"
        if self.verified == VerifiedBy.SOURCE.value:
            pids = listed([*dict.fromkeys(str(path.pid) for path in self.paths if path.pid)])
            return f"attached, on the word of your own process {pids}".rstrip()
        return f"verified by {self.verified}"

    def __repr__(self) -> str:
        """Return one line: what came, how long it took, and by which paths."""
        ways = dict.fromkeys(
            f"{path.transport}{'-attach' if path.attached else ''} from {path.source}"
            for path in self.paths
        )
        what = format_bytes(self.bytes) if self.files is None else count(self.files.count, "file")
        by = f" by {listed([*ways])}" if ways else ""
        return (
            f"<PullReport {self.model}: {what} in {format_seconds(self.seconds)}{by}, "
            f"{self.verdict}>"
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as `mx pull --json` prints it."""
        return {
            "model": self.model,
            "identity": self.identity,
            "pin": self.pin,
            "pin_covers_files": self.pin_covers_files,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "gb_per_s": None if self.gb_per_s is None else round(self.gb_per_s, 3),
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
                | ({"pid": path.pid} if path.pid else {})
                | ({"detail": path.detail} if path.detail else {})
                for path in self.paths
            ],
            "retries": self.retries,
            "left": [
                {"source": each.source, "why": each.reason.code, "reason": str(each.reason)}
                for each in self.left
            ],
            "fallback": self.fallback,
            "control_s": round(self.control_s, 6),
            **self.folder.to_json(),
        } | self._optional()

    def _optional(self) -> dict[str, object]:
        found: dict[str, object] = {} if self.files is None else {"files": asdict(self.files)}
        if self.defined_by:
            found["defined_by"] = self.defined_by
        if self.companions:
            found["companions"] = [asdict(each) for each in self.companions]
        if self.newest:
            found["newest"] = self.newest
        if self.steps:
            found["steps"] = [asdict(each) for each in self.steps]
        if self.stages:
            found["stages"] = [s._asdict() | {"gb_per_s": s.gb_per_s} for s in self.stages]
        return found if self.moved_bytes is None else found | {"moved_bytes": self.moved_bytes}


def again(error: MxError, how: str) -> MxError:
    """Add to the error's hint how to go on from what is kept, and return it."""
    rest = error.hint.removeprefix("start the pull again").removeprefix("; ")
    error.hint = "; ".join(filter(None, [how, rest])) if how else error.hint
    return error


def explained(causes: Sequence[MxError]) -> list[MxError]:
    """Return the causes, last those sources that say that they were written to: that a transport
    notices that memory has changed follows from it, and may come before or after it."""
    written = [each for each in causes if isinstance(each, SourceChangedError)]
    peers = {each.peer for each in written}

    def follows(each: MxError) -> bool:
        return isinstance(each, StaleGenerationError) and each.peer in peers

    return [*(each for each in causes if not follows(each)), *written]


def _refused(causes: Sequence[MxError]) -> dict[str, str]:
    """Return the sources that refuse this process, and the hints, if there are no others. That the
    connections end, too, follows from a refusal, and is said before or after it."""
    refused = {e.peer: e.hint for e in causes if isinstance(e, PeerUntrustedError)}
    return refused if refused.keys() == {getattr(e, "peer", "") for e in causes} else {}


def final_error(
    model: str,
    layout: Layout,
    layers_ready: int,
    bytes_done: int,
    causes: Sequence[MxError],
    bytes_total: int | None = None,
) -> MxError:
    """Return the error of a pull that ran out of sources: how far it came, and the last cause of
    each kind from each source. `bytes_total` is what it should move, if not the whole layout."""
    causes = explained(causes)
    last = {(type(e), getattr(e, "peer", "") or e.message): e.message for e in causes}
    said = "; ".join(last.values()) or "no source was left"
    total = layout.payload_nbytes if bytes_total is None else bytes_total
    far = (
        f"pull of {model} stopped after {layers_ready} of {count(len(layout.layers), 'layer')}, "
        f"{format_bytes(bytes_done)} of {format_bytes(total)}: {said}"
    )
    if causes and isinstance(causes[-1], DigestError):
        return DigestError(far, peer=causes[-1].peer, hint=causes[-1].hint)
    if refused := _refused(causes):
        peer, hint = refused.popitem()
        return PeerUntrustedError(far, peer=peer, hint=hint)
    # A pull that is started again would end alike.
    lasting = causes and isinstance(causes[-1], LocalError | SourceChangedError)
    hint = causes[-1].hint if lasting else ""
    return IncompleteError(far, hint=hint or "start the pull again; mx sources shows who is left")


def superseded(key: ModelKey, newest: ModelKey, why: str = "") -> SupersededError:
    """Return the error of a pull by name whose weights can't be obtained whole any more."""
    why = why or f"no sources hold all of {key} any more"
    return SupersededError(
        f"{why}; {key.name} means {newest} now",
        hint="start the pull again for that",
    )


def none_opened(model: str, causes: Sequence[MxError]) -> MxError:
    """Return the error of a pull that could not open any path to a source."""
    if causes and all(isinstance(cause, LocalError) for cause in causes):
        return causes[-1]
    lies = [cause for cause in causes if isinstance(cause, DigestError)]
    if lies:
        return lies[-1]
    kind = PeerUntrustedError if _refused(causes) else NoSourceError
    return kind(
        f"no source of {model} could be opened: "
        + "; ".join(dict.fromkeys(str(cause) for cause in causes)),
        hint="mx sources shows who is registered",
    )
