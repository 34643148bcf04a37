"""The options of one pull."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from mx.core.revisions import MAIN
from mx.core.types import CHECKPOINT, Layout, ModelKey, Packaging
from mx.errors import ConfigError
from mx.memory.arena import BorrowedArena, HostArena, MemfdArena
from mx.plugins import NO_CONTEXT, TransportContext
from mx.wire.locate import LocateRequest

if TYPE_CHECKING:
    from mx.core.local_ranks import LocalRanks
    from mx.core.reuse import ReusableWeights
    from mx.core.selection import Selection
    from mx.fetching.report import StepReport
    from mx.memory.in_place import InPlace
    from mx.memory.live import Memory
    from mx.storage.stores import CheckpointStore
    from mx.storage.writer import CheckpointWriter
    from mx.swarm.sharing import MakeHost
    from mx.transport import TlsFiles


@dataclass(frozen=True)
class PullOptions(LocateRequest):
    """Made by the API from its arguments and the settings.

    `name` may be NAME@PIN; without a `revision` it means "main", or the newest update of it, and
    without a `variant` "checkpoint", or the only one that is listed.
    `coordinator` or `peer` says where to look for sources, unless `from_sources` is False; `stores`
    are read in their order for what sources do not serve. With `bound` what a source or the
    coordinator has said of the weights holds for the stores too; otherwise a store is taken as it
    is where no layer was delivered before. `skipped` are the steps of the chain that this pull does
    not have. `files_only` pulls no weights, but all side files, or those of the
    names or patterns in `files`. With `out`, `companions` says whether these are written, too, and
    `writer` is called in place of `CheckpointWriter`. `defined_by` is the step that says what the
    model is, where the pin in `name` is no other's.
    `device` is "cpu" or
    "cuda:UUID", `into` the caller's memory, `reuse` the weights that this process holds (the pull
    empties the list). `follow` goes over to a newer revision when the weights change. `selection`
    says which tensors are wanted, None: all; `local_ranks` which pulls of this host share what they
    want. `host` lets others read from the pull, and needs `host_modules`, which are imported when a
    transfer begins;
    `alone_because` says why it is None where users may not expect that.
    `cache` is the path of the socket of this host's cache, to be asked first; "" for none.
    `coordinate_always` coordinates on every medium when a source says that others read there, not
    only over networks.
    """

    from_sources: bool = True
    stores: tuple[CheckpointStore, ...] = ()
    bound: bool = False
    skipped: tuple[StepReport, ...] = ()
    store_timeout_s: float = 30.0
    defined_by: str = ""
    out: Path | None = None
    writer: Callable[..., CheckpointWriter] | None = None
    resume: bool = True
    files_only: bool = False
    files: tuple[str, ...] | None = None
    companions: bool = True
    device: str = "cpu"
    into: memoryview | InPlace | None = None
    reuse: list[ReusableWeights] = field(default_factory=list)
    follow: bool = False
    transport: str | None = None
    strong: bool = False
    attach: bool = True
    data_tls: TlsFiles | None = None
    streams: int | str = "auto"
    stall_timeout_s: float = 4.0
    wait_s: float = 0.0
    trusted_fabric: bool = False
    nics: tuple[str, ...] = ()
    host: MakeHost | None = None
    selection: Selection | None = None
    local_ranks: LocalRanks | None = None
    host_modules: tuple[str, ...] = ()
    coordinate_always: bool = False
    alone_because: str = ""
    cache: str = ""
    transport_context: TransportContext = field(default=NO_CONTEXT, compare=False)

    @property
    def key(self) -> ModelKey:
        """The requested model, as far as it is known before it is resolved."""
        variant = self.variant or CHECKPOINT
        return ModelKey(self.name.partition("@")[0], self.revision or MAIN, variant)

    def wanted_files(self, packaging: Packaging) -> Packaging:
        """Return a packaging with only those side files that are wanted."""
        if self.files is None:
            return packaging
        sides = packaging.side_files
        wanted = [side for side in sides if any(fnmatchcase(side.path, n) for n in self.files)]
        return packaging._replace(side_files=tuple(wanted))

    @property
    def pin(self) -> str:
        """The digits after the @ of `name`; "" without any."""
        return self.name.partition("@")[2]

    @property
    def patience_s(self) -> float:
        """How many seconds to try again while all sources have as many readers as they admit."""
        return self.wait_s or self.stall_timeout_s

    def new_arena(self, layout: Layout, shift: int = 0) -> Memory:
        """Return an arena: the caller's memory, memory that others can attach later, or plain
        memory of the host, which begins `shift` bytes after a page, or a GPU. Raises ConfigError if
        the caller's memory is too small or its tensors do not fit, CapacityError."""
        nbytes = layout.arena_nbytes
        if self.into is not None:
            from mx.memory.in_place import WHOLE, InPlace

            if isinstance(self.into, InPlace):
                what = WHOLE if self.selection is None else "the selection"
                return self.into.arena(layout, what)
            if self.into.nbytes < nbytes:
                raise ConfigError(f"{nbytes} bytes are needed, and `into` has {self.into.nbytes}")
            return BorrowedArena(self.into[:nbytes])
        if self.device != "cpu":
            from mx.memory.device import DeviceArena

            return DeviceArena(nbytes, self.device)
        if self.hold:
            return MemfdArena(nbytes, name=f"pull:{self.name}")
        return HostArena(nbytes, shift)
