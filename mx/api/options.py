"""Checks a pull's arguments and settings and turns them into `PullOptions`."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mx import config
from mx.api.chain import chain_of
from mx.api.common import check_type, tls_of, transports, variant_text
from mx.api.serving import source_options
from mx.api.tensors import in_place, is_module
from mx.core.local_ranks import LocalRanks
from mx.core.pages import Pages
from mx.core.reference import ModelReference, parse_reference
from mx.core.selection import Selection, Slice
from mx.core.types import Manifest, ModelKey
from mx.errors import ConfigError, NotAllowedError
from mx.memory.in_place import InPlace
from mx.memory.live import Memory
from mx.source.endpoint import dialled_host
from mx.source.relay import Relay
from mx.swarm.sharing import MakeHost
from mx.target.options import PullOptions
from mx.wire.address import is_local
from mx.wire.private import socket_in_use

log = logging.getLogger(__name__)


def pull_options(
    model: str,
    settings: config.Settings,
    *,
    source: str = "peers",
    peer: str | None = None,
    path: str | Path | None = None,
    fallback: str | Path | None = None,
    out: str | Path | None = None,
    revision: str,
    variant: object,
    transport: str | None,
    wait_s: float | None = None,
    only: str | Collection[str] | None = None,
    slices: Mapping[str, Slice] | None = None,
    files_only: bool | Collection[str] = False,
    **rest: Any,
) -> PullOptions:
    """Check the arguments of `pull` and `plan`.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        settings: What is not given as an argument.
        source: "auto" for all steps of the chain, "peers" for those that are named.
        peer, path, fallback: Where to pull from; at most one of them.
        out: The folder to write a checkpoint to.
        revision: The revision's label, "" for the one that `model` means.
        variant: The variant, text or a `ProcessingKey`; "" for the one that `model` means.
        transport: The only one to use; None for all.
        wait_s: Seconds to wait for a source, or text like "1m"; None for the settings' value.
        only, slices: Which tensors to pull, and which slices of them.
        files_only: Whether to pull only side files, and which.
        rest: Further fields of `PullOptions`.

    Returns:
        The options of the pull.

    Raises:
        ConfigError: An argument is of a wrong type or has a wrong value; it is named.
    """
    variant = variant_text(variant)
    rest["files_only"], files = _files(files_only)
    _check_types(
        model=model, peer=peer, path=path, fallback=fallback, out=out, revision=revision,
        transport=transport, **rest,
    )  # fmt: skip
    settings = config.given(settings, wait_s=wait_s)
    reference = parse_reference(model, revision=revision, variant=variant)
    known = transports()
    if transport is not None and transport not in known:
        raise ConfigError(
            f"there is no transport {transport!r}", hint=f"there are: {', '.join(sorted(known))}"
        )
    if sum(where is not None for where in (peer, path, fallback)) > 1:
        raise ConfigError("give only one of `peer`, `path` and `fallback`")
    if rest.get("follow"):
        auto = None if source == "peers" else source
        _check_follow(
            reference, path=path, fallback=fallback, source=auto, out=out,
            device=rest.get("device"),
        )  # fmt: skip
    selection = _selection(only, slices)
    if selection is not None:
        _check_subset(out=out, **rest)
    _check_ranks(rest.get("local_ranks"), selection, strong=rest.get("strong", False))
    if rest.get("files_only"):
        _check_files_only(model, path, rest)
    tls = tls_of(settings)
    in_place = isinstance(rest.get("into"), InPlace)
    host, alone_because = _host(settings, peer, rest.get("coordinator"), live=in_place)
    if rest.get("hold") and rest.get("coordinator"):
        dialled_host(settings.listen, settings.advertise, rest["coordinator"])
    return PullOptions(
        name=reference.pinned_name,
        revision=reference.revision,
        variant=reference.variant,
        peer=peer,
        from_sources=path is None,
        **chain_of(source, settings, reference, path, fallback),
        out=None if out is None else Path(out),
        tls=tls,
        data_tls=None if settings.data_plaintext else tls,
        trusted_fabric=settings.trusted_fabric,
        insecure=settings.insecure,
        streams=settings.streams,
        stall_timeout_s=settings.stall_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        wait_s=settings.wait_s,
        chunk_nbytes=settings.chunk_bytes or None,
        nics=settings.nics,
        transport=transport,
        host=host,
        coordinate_always=settings.coordinated_reading == "always",
        alone_because=alone_because,
        selection=selection,
        files=files,
        cache=_cache(settings, selection, peer=peer, path=path, transport=transport, **rest),
        **rest,
    )


def _files(files_only: object) -> tuple[bool, tuple[str, ...] | None]:
    """Return whether only side files are pulled, and their names or patterns, None for all."""
    if isinstance(files_only, bool):
        return files_only, None
    known = "it is True, False, or names or patterns of files"
    if isinstance(files_only, str):
        raise ConfigError(f"`files_only` is text, {files_only!r}", hint=known)
    check_type("files_only", files_only, Collection, known)
    assert isinstance(files_only, Collection)
    for name in files_only:
        check_type("files_only", name, str, known)
    return True, tuple(files_only)


def _cache(
    settings: config.Settings,
    selection: Selection | None,
    *,
    peer: str | None,
    path: str | Path | None,
    transport: str | None,
    **rest: Any,
) -> str:
    """Return the socket of the cache that a pull with these arguments asks; "" for none.

    Only pulls ask that can attach to what the cache holds.
    """
    elsewhere = peer is not None or path is not None or not rest.get("coordinator")
    of_its_own = any(rest.get(name) for name in ("hold", "reuse", "follow", "files_only"))
    attaches = rest.get("attach", True) and rest.get("into") is None and selection is None
    on_cpu = rest.get("device", "cpu") == "cpu" and transport in (None, "shm")
    if elsewhere or of_its_own or not attaches or not on_cpu:
        return ""
    try:
        return socket_in_use(settings.cache_socket)
    except NotAllowedError as error:
        log.warning("no cache is asked: %s", error)
        return ""


def _selection(
    only: str | Collection[str] | None, slices: Mapping[str, Slice] | None
) -> Selection | None:
    """Return which tensors are wanted; None: all. Raises ConfigError."""
    if only is not None:
        check_type("only", only, Collection, "it is names or patterns of tensors")
    if slices is not None:
        check_type("slices", slices, Mapping, "it maps names or patterns of tensors to slices")
    if only is None and slices is None:
        return None
    selection = Selection(only, slices)
    return None if selection.everything else selection


def _check_subset(**others: object) -> None:
    """Raise ConfigError for arguments that a pull of some tensors can't have."""
    others["device"] = "" if others.get("device") == "cpu" else others.get("device")
    for name in ("out", "hold", "reuse", "follow", "device", "files_only"):
        if others.get(name):
            raise ConfigError(
                f"a pull with `only` or `slices` can't have `{name}` in this version",
                hint="pull all tensors, or leave that out",
            )


def _check_ranks(ranks: object, selection: Selection | None, *, strong: bool) -> None:
    """Raise ConfigError if pulls with these arguments can't share what they read."""
    if ranks is None:
        return
    check_type("local_ranks", ranks, LocalRanks, "it is mx.LocalRanks(rank, size)")
    if selection is None:
        raise ConfigError(
            "`local_ranks` share parts of a model: give `only` or `slices`",
            hint="pulls of whole models on one host share memory, or what they read, by themselves",
        )
    if strong:
        raise ConfigError(
            "`local_ranks` take each other's word, and `verify=strong` takes none",
            hint="leave out one of them",
        )


def _check_follow(reference: ModelReference, **others: object) -> None:
    """Raise ConfigError if a pull with these arguments can't follow its model."""
    others["device"] = None if others["device"] == "cpu" else others["device"]
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"a pull with `{name}` can't `follow` its model")
    if reference.pin or reference.revision:
        raise ConfigError("a pinned revision never changes", hint="leave out `follow`")


#: Arguments by what they must be; `_OPTIONAL` ones may be None.
_TEXTS = ("model", "revision", "peer", "coordinator", "transport")
_PATHS = ("path", "fallback", "out")
_FLAGS = ("hold", "attach", "resume", "follow")
_OPTIONAL = ("peer", "coordinator", "transport", *_PATHS)


def _check_types(**given: object) -> None:
    """Raise ConfigError for an argument of a wrong type, which would else fail deep inside."""
    for name, value in given.items():
        if value is None and name in _OPTIONAL:
            continue
        if name in _TEXTS:
            check_type(name, value, str, "it must be text")
        elif name in _PATHS:
            check_type(name, value, (str, os.PathLike), "it must be text or a pathlib.Path")
        elif name in _FLAGS:
            check_type(name, value, bool, "it is True or False")


def _check_files_only(model: str, path: str | Path | None, rest: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a pull of files only can't do."""
    given = {
        "hold": rest.get("hold"),
        "into": rest.get("into") is not None,
        "reuse": rest.get("reuse"),
        "follow": rest.get("follow"),
        "device": rest.get("device", "cpu") != "cpu",
    }
    for name, wanted in given.items():
        if wanted:
            raise ConfigError(
                f"`files_only` pulls no weights, so `{name}` has nothing to work on",
                hint=f"leave out `files_only` or `{name}`",
            )
    if path is not None and "@" in model:
        raise ConfigError(
            "only the weights prove a pin, and `files_only` does not read those in `path`",
            hint="leave out the pin, or pull from a source, whose files the pin can prove",
        )


def _host(
    settings: config.Settings, peer: str | None, coordinator: str | None, *, live: bool
) -> tuple[MakeHost | None, str]:
    """Return what lets others read from a pull that finds its sources at `peer` or `coordinator`;
    None, and why, where others could not reach it: it listens on loopback, they are elsewhere."""
    dialled, asked = settings.advertise or settings.listen, peer or coordinator
    if asked is not None and is_local(dialled) and not is_local(asked):
        return None, (
            f"only this machine reaches {dialled}: this pull passes nothing on to others "
            "(`listen=HOST:0` with an address of this machine, or `advertise=HOST:PORT`, lets it)"
        )
    options = source_options(settings, asked, live=live)

    def make(
        source_id: str, key: ModelKey, manifest: Manifest, pages: Pages, arena: Memory
    ) -> Relay:
        return Relay(source_id, options, transports(), coordinator, key, manifest, pages, arena)

    return make, ""


def destination(into: object) -> memoryview | InPlace | None:
    """Return what a pull fills: a buffer, or the tensors of a module or a state dict.

    Raises:
        ConfigError: It is none of these, or can't be written to.
    """
    if into is None:
        return None
    if isinstance(into, Mapping) or is_module(into):
        return in_place(into)
    return writable_bytes(into)


def writable_bytes(into: object) -> memoryview:
    """Return a view of `into` as bytes.

    Args:
        into: An object with a buffer; it stays the caller's, who keeps it as long as the view.

    Raises:
        ConfigError: Its buffer is read-only or not contiguous, or it has none.
    """
    try:
        view = memoryview(into)  # type: ignore[arg-type]
        if not view.readonly:
            return view.cast("B")
    except TypeError as error:
        raise ConfigError(
            f"`into` is not a contiguous buffer: {error}",
            hint="it is a buffer, a torch.nn.Module, or a state dict",
        ) from error
    raise ConfigError("`into` is read-only")
