"""Takes weights into a source: copied into memory of mx's own, or lent where they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mx import trace
from mx.api.tensors import live_tensors
from mx.core.types import Layout, ModelKey
from mx.errors import ConfigError
from mx.memory.arrays import arrays_of
from mx.memory.describe import describe_arrays
from mx.runtime import in_thread, uncut
from mx.source.model import SourceModel, hold_checkpoint, hold_tensors, lend_tensors
from mx.storage.staging import recorded
from mx.text import listed

log = logging.getLogger(__name__)


def hold(
    what: str | Path | Any,
    key: ModelKey,
    device: str,
    *,
    layout_version: int | None = None,
    files: Path | None = None,
    follow: Collection[Path] = (),
    weights: Collection[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SourceModel:
    """Copy a checkpoint, a state dict or a module into memory of its own, and hash it.

    Args:
        what: As for `serve`.
        key: The name, revision and variant to hold it as.
        device: "cpu", `mx.source.model.PINNED` or "cuda:UUID".
        layout_version: As for `mx.core.layout.plan_layout`.
        files: A folder whose side files travel with tensors; None: no files do.
        follow: Folders that links of a checkpoint's side files may lead to.
        weights: Patterns of the paths of copies of its main weights that travel, too.
        on_progress: As for `serve`.
        cancelled: As for `serve`.

    Returns:
        The model in memory, which the caller owns.

    Raises:
        MxError: As `serve`.
    """
    if isinstance(what, str | Path):
        with trace.span("serve.load", path=str(what)) as span:
            held = hold_checkpoint(
                Path(what),
                key,
                layout_version=layout_version,
                device=device,
                shortcuts=device == "cpu",
                threads=2,
                follow=follow,
                weights=weights,
                progress=on_progress,
                cancelled=cancelled,
            )
            span.set(nbytes=held.manifest.layout.payload_nbytes)
            was = recorded(Path(what)).partition(" ")[0]
            if was and not held.manifest.ref.pinned_by(was):
                text = "%s is not what its pull wrote, @%s: mx verify says which tensors differ"
                log.warning(text, what, was[:16])
            return held
    from mx.memory.torch_source import describe

    found = describe(what)
    return hold_tensors(
        found.specs,
        found.aliases,
        found.views(),
        key,
        files=files,
        layout_version=layout_version,
        device=device,
        shortcuts=device == "cpu",
    )


def lend(
    what: Any,
    key: ModelKey,
    *,
    layout_version: int | None = None,
    files: Path | None = None,
    non_persistent: bool = False,
    frozen: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> SourceModel:
    """Hash the tensors of a module or a state dict where they are. Nothing is copied.

    Args:
        what: The module or the state dict; the model refers to it.
        key: The name, revision and variant to lend it as.
        layout_version: As for `mx.core.layout.plan_layout`.
        files: A folder whose side files travel along; None: no files do.
        non_persistent: Whether to lend the buffers that a state dict leaves out, too.
        frozen: As for `serve`.
        cancelled: As for `serve`.

    Returns:
        The model, whose memory is the tensors' own.

    Raises:
        MxError: As `serve`.
    """
    if isinstance(what, str | Path):
        raise ConfigError(
            "only tensors in memory can be lent", hint="serve a path without `copy=False`"
        )
    tensors = live_tensors(what, non_persistent=non_persistent)
    arrays = arrays_of(tensors())
    with trace.span("serve.lend", tensors=len(arrays)):
        return lend_tensors(
            describe_arrays(arrays),
            arrays,
            tensors,
            key,
            files=files,
            layout_version=layout_version,
            frozen=frozen,
            cancelled=cancelled,
        )


async def taken_in(
    take: Callable[[Callable[[], bool]], SourceModel], cancelled: Callable[[], bool]
) -> SourceModel:
    """Run `hold` or `lend` on a thread, and return the model; on the loop.

    If this is cancelled the thread is told to stop, and what it has made is released.

    Args:
        take: Calls `hold` or `lend`, with the `cancelled` that it is given.
        cancelled: As for `serve`.

    Raises:
        MxError: As `serve`.
    """
    abandoned = threading.Event()
    taking = asyncio.ensure_future(in_thread(take, lambda: abandoned.is_set() or cancelled()))
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        abandoned.set()
        await uncut(_released(taking))
        raise


async def _released(taking: asyncio.Future[SourceModel]) -> None:
    with contextlib.suppress(Exception):  # its caller does not wait for it any more
        (await taking).release_all()


def check_names(layout: Layout, names: Collection[str] | None) -> None:
    """Raise ConfigError if some names are not among a model's tensors."""
    if isinstance(names, str):
        raise ConfigError("`names` is a list of names, not text")
    known = {t.name for t in layout.tensors} | {alias.name for alias in layout.aliases}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ConfigError(f"there are no tensors {listed(unknown)}")
