"""`thaw`: reads a snapshot back, each byte verified, and serves what it held."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config
from mx.api.pulling import pull
from mx.api.serving import serve
from mx.core.reference import ModelReference, parse_reference
from mx.core.types import ModelKey
from mx.errors import ConfigError
from mx.snapshots.container import Snapshot, folder_of, read
from mx.snapshots.reading import check_asked, rank_of
from mx.snapshots.signing import trusted

if TYPE_CHECKING:
    from mx.api.source import Source
    from mx.api.target import Pull
    from mx.fetching.report import PullReport


@dataclass
class Thawed:
    """A snapshot that was read; a context manager, which ends what holds or serves it. `pulls` have
    the tensors, by variant. `vouched_by` says what vouches for it: "pin", "signature", or "" for
    the snapshot alone."""

    snapshot: Snapshot
    vouched_by: str
    pulls: dict[str, Pull] = field(default_factory=dict)
    seconds: float = 0.0
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Thawed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of it. Idempotent."""
        self._closing.close()


def thaw(
    folder: str | Path,
    model: str = "",
    *,
    variant: str = "",
    device: str = "cpu",
    owner: str | None = None,
    settings: config.Settings | None = None,
    wait: Callable[[Pull, ModelKey], PullReport] = lambda pull, key: pull.wait(),
) -> Thawed:
    """Read a snapshot into memory, all ranks at a time, each byte verified by the digests beside
    it. Blocks.

    Args:
        folder: The folder that `freeze` wrote.
        model: NAME@PIN that it has to be: of the one rank that it has, or that `variant` names.
        variant: One rank; "" takes all.
        device: Whose memory it comes into, as for `mx.pull`.
        owner: Whose signature counts, as for `mx.pull`.
        settings: Settings to use; None loads them from the environment and the files.
        wait: Called with each pull and what it is of; returns its report.

    Returns:
        What was read; close it.

    Raises:
        CheckpointError: It holds other weights than are asked for, or than it says.
        ConfigError: There is no snapshot, or it is of another model or variant.
        MxError: As `mx.pull`.
    """
    settings = settings or config.load()
    thawed, named, numbers = checked(Path(folder), model, variant=variant, settings=settings)
    snapshot = thawed.snapshot
    began_s = time.monotonic()
    try:
        for number in numbers:
            key = snapshot.key(number)
            thawed.pulls[key.variant] = thawed._closing.enter_context(
                pull(
                    named.pinned_name,
                    source="snapshot",
                    path=folder,
                    revision=named.revision or key.revision,
                    variant=key.variant,
                    device=device,
                    owner=owner,
                    settings=settings,
                )
            )
        for number in numbers:
            key = snapshot.key(number)
            wait(thawed.pulls[key.variant], key)
    except BaseException:
        thawed.close()
        raise
    thawed.seconds = time.monotonic() - began_s
    return thawed


def checked(
    folder: Path, model: str, *, variant: str, settings: config.Settings
) -> tuple[Thawed, ModelReference, Sequence[int]]:
    """Return a snapshot of which nothing was read yet, what is asked for, and which ranks those
    are. The arguments are those of `thaw`, which this raises as."""
    snapshot = read(folder)
    named = parse_reference(model or snapshot.name, variant=variant)
    numbers = _numbers(snapshot, named.variant)
    if named.pin and len(numbers) > 1:
        raise ConfigError("a pin is of one rank", hint="name the rank's `variant`, too")
    for number in numbers:
        check_asked(snapshot, number, named.name, named.revision, named.pin)
    vouched = "signature" if not trusted(snapshot, (), settings) else ""
    return Thawed(snapshot, "pin" if named.pin else vouched), named, numbers


def _numbers(snapshot: Snapshot, variant: str) -> Sequence[int]:
    """Return the rank that a variant is; all for ""."""
    return [rank_of(snapshot, variant)] if variant else range(len(snapshot.ranks))


def served(
    folder: Path,
    *,
    model: str = "",
    revision: str = "",
    variant: str = "",
    settings: config.Settings,
    **how: Any,
) -> list[Source]:
    """Serve what a snapshot held, each rank as the variant that it is.

    Args:
        folder: The folder.
        model: NAME or NAME:REVISION; "" for those that it was frozen from.
        revision: The revision, where `model` names none.
        variant: One rank; "" for all.
        settings: The settings of the process.
        how: Further arguments of `mx.serve`.

    Returns:
        The sources, which the caller closes.

    Raises:
        MxError: As `read`, and as `mx.serve`.
    """
    snapshot = read(folder)
    name = model or snapshot.name
    own = "" if ":" in name else revision or snapshot.revision
    with contextlib.ExitStack() as made:
        sources = []
        for number in _numbers(snapshot, variant):
            rank = snapshot.ranks[number]
            source = serve(
                folder_of(folder, number),
                model=name,
                revision=own,
                variant=rank.variant,
                settings=settings,
                **how,
            )
            sources.append(made.enter_context(source))
        made.pop_all()
    return sources
