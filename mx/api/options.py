"""Checks a pull's arguments and settings and turns them into `PullOptions`."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mx import config, packs
from mx.api.chain import PEERS, chain_of
from mx.api.common import check_type, resolve_device, transports, variant_text
from mx.core.reference import ModelReference, parse_reference
from mx.core.variant import companion_path, main_variant
from mx.errors import ConfigError, NotAllowedError
from mx.fetching.options import PullOptions
from mx.plugins import transport_context
from mx.storage.stores import SNAPSHOT
from mx.wire.address import is_local, tls_of
from mx.wire.private import socket_in_use

if TYPE_CHECKING:
    from mx.api.arguments import PlanArguments, PullArguments
    from mx.core.pages import Pages
    from mx.core.reuse import ReusableWeights
    from mx.core.selection import Selection, Slice
    from mx.core.types import Manifest, ModelKey
    from mx.memory.in_place import InPlace
    from mx.memory.live import Memory
    from mx.publickey import PublicKey
    from mx.source.relay import Relay
    from mx.swarm.sharing import MakeHost

log = logging.getLogger(__name__)


def settings_of(arguments: PlanArguments) -> config.Settings:
    """Return the settings of a call, and add their coordinator to the arguments if those have none.

    Raises:
        ConfigError: They are of a wrong type, or one of them has a wrong value.
    """
    settings = arguments.get("settings")
    if settings is not None:
        check_type("settings", settings, config.Settings, "make them by `mx.config.load({...})`")
    settings = settings or config.load()
    arguments["coordinator"] = arguments.get("coordinator") or settings.coordinator
    return settings


def pull_options(model: str, settings: config.Settings, asked: PullArguments) -> PullOptions:
    """Check the arguments of `pull` and `plan`.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        settings: What is not given as an argument.
        asked: The arguments; without a coordinator none is asked.

    Returns:
        The options of the pull.

    Raises:
        ConfigError: An argument is of a wrong type or has a wrong value; it is named.
    """
    device = resolve_device(asked.get("device", "cpu"))
    verify = asked.get("verify", "chunks")
    if verify not in ("chunks", "strong"):
        raise ConfigError(f"`verify={verify}` is not understood", hint="it is chunks or strong")
    into = destination(asked.get("into"))
    if into is not None:
        device = _device_of(into, device)
    reuse: list[ReusableWeights] = []
    if (holders := asked.get("reuse", ())) != ():
        from mx.api.reuse import held_by

        reuse = held_by(holders)
    variant = variant_text(asked.get("variant", ""))
    files_only, files = _files(asked.get("files_only", False))
    _check_types({**asked, "model": model})
    settings = config.given(settings, wait_s=asked.get("wait_s"), streams=asked.get("streams"))
    reference = parse_reference(model, revision=asked.get("revision", ""), variant=variant)
    transport, known = asked.get("transport"), transports()
    if transport is not None and transport not in known:
        hint = f"there are: {', '.join(sorted(known))}"
        if str(transport).lower() in ("rdma", "nixl", "ib", "infiniband", "roce", "verbs"):
            hint += "; RDMA is used by `transport=ucx`"
        raise ConfigError(f"there is no transport {transport!r}", hint=hint)
    peer, path, fallback = asked.get("peer"), asked.get("path"), asked.get("fallback")
    if sum(where is not None for where in (peer, path, fallback)) > 1:
        raise ConfigError("give only one of `peer`, `path` and `fallback`")
    named, trust = asked.get("owner") or settings.owner, settings.trust
    owners = _owners(named, trust, reference.name) if named or trust else ()
    of_snapshot = asked.get("source") == SNAPSHOT  # which its owner may have signed
    if owners and path is not None and not (reference.pin or of_snapshot):
        raise ConfigError(
            f"nothing in `path` shows that it is {reference.name} of its `owner`",
            hint="name the pin, or pull from a source",
        )
    coordinator, out, tls = asked.get("coordinator"), asked.get("out"), tls_of(settings)
    if asked.get("follow"):
        _check_follow(reference, asked, device)
    live = into is not None and not isinstance(into, memoryview)
    host, alone_because = _host(settings, peer, coordinator, live=live)
    flags = _FLAGS & asked.keys()
    options = settings.fill(
        PullOptions,
        **dict(zip(flags, map(asked.__getitem__, flags), strict=True)),
        name=reference.pinned_name,
        revision=reference.revision,
        variant=reference.variant,
        coordinator=coordinator,
        peer=peer,
        from_sources=path is None,
        **chain_of(asked.get("source", PEERS), settings, reference, path, fallback),
        out=None if out is None else Path(out),
        files_only=files_only,
        files=files,
        device=device,
        into=into,
        reuse=reuse,
        owners=owners,
        transport=transport,
        strong=verify == "strong",
        tls=tls,
        data_tls=None if settings.data_plaintext else tls,
        transport_context=transport_context(settings),
        host=host,
        host_modules=("mx.api.serving", "mx.source.relay") if host is not None else (),
        coordinate_always=settings.coordinated_reading == "always",
        alone_because=alone_because,
        selection=_selection(asked.get("only"), asked.get("slices")),
        local_ranks=asked.get("local_ranks"),
    )
    if asked.get("source") == SNAPSHOT:
        if (read := packs.optional("mx.snapshots.reading:from_snapshot")) is None:
            raise ConfigError("the pack mx.snapshots is not there", hint="install mx as a whole")
        options = read(options, settings)
    if options.selection is not None:
        _check_subset(options)
    if options.local_ranks is not None:
        _check_ranks(options)
    if options.files_only:
        _check_files_only(options)
    if options.hold and coordinator:  # refused now, and not when all has been pulled
        from mx.source.endpoint import dialled_host

        ours = dialled_host(settings.listen, settings.advertise, coordinator)
        if tls is not None:
            from mx.wire.tls import check_server_files  # it needs `cryptography`

            check_server_files(tls, ours)
    return replace(options, cache=_cache(options, settings))


def asked_companion(options: PullOptions, companion: str) -> tuple[PullOptions, str]:
    """Return the options to find a model of which only a companion is wanted, and its path; "" if
    the main weights are wanted, or the companion is pinned itself.

    Args:
        options: The options of a pull.
        companion: The argument of this name.

    Raises:
        ConfigError: It can't have one of the other options.
    """
    named = "" if options.pin else companion_path(options.variant)
    if named and companion not in ("", named):
        raise ConfigError(f"the variant names {named}, and `companion` is {companion}")
    path = companion or named
    for name in ("follow", "files_only") if path else ():
        if getattr(options, name):
            raise ConfigError(f"a companion can't have `{name}`", hint="leave out one of them")
    return (replace(options, variant=main_variant(options.variant)) if named else options), path


def _device_of(into: memoryview | InPlace, device: str) -> str:
    """Return the device of what a pull fills. Raises ConfigError: `device` is another one."""
    there = "cpu" if isinstance(into, memoryview) else into.device
    if device not in ("cpu", there):
        where = "host memory" if there == "cpu" else f"memory of {there}"
        raise ConfigError(f"`into` is {where}", hint="leave out either `into` or `device`")
    return there


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


def _owners(named: str, trust: str, name: str) -> tuple[PublicKey, ...]:
    """Return the keys of which one has to be a name's owner; () if any may be. Raises
    ConfigError."""
    if named:
        from mx.publickey import parse

        try:
            return (parse(named),)
        except ConfigError as error:
            raise ConfigError(f"`owner`: {error.message}", hint="`mx keygen` prints it") from None
    from mx.trustfile import owners

    return owners(Path(trust), name)


def _cache(options: PullOptions, settings: config.Settings) -> str:
    """Return the socket of the cache that a pull with these options asks; "" for none.

    Only pulls ask that can attach to what the cache holds.
    """
    elsewhere = options.peer is not None or not options.from_sources or not options.coordinator
    of_its_own = options.hold or options.reuse or options.follow or options.files_only
    attaches = options.attach and options.into is None and options.selection is None
    on_cpu = options.device == "cpu" and options.transport in (None, "shm")
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
    from mx.core.selection import Selection

    selection = Selection(only, slices)
    return None if selection.everything else selection


def _check_subset(options: PullOptions) -> None:
    """Raise ConfigError for options that a pull of some tensors can't have."""
    for name in ("out", "hold", "reuse", "follow", "device", "files_only"):
        if name == "device" and options.into is not None:
            continue
        if getattr(options, name) not in _UNUSED:
            raise ConfigError(
                f"a pull with `only` or `slices` can't have `{name}` in this version",
                hint="pull all tensors, or leave that out",
            )


def _check_ranks(options: PullOptions) -> None:
    """Raise ConfigError if pulls with these options can't share what they read."""
    from mx.core.local_ranks import LocalRanks

    check_type("local_ranks", options.local_ranks, LocalRanks, "it is mx.LocalRanks(rank, size)")
    if (options.selection is None) == (options.device == "cpu"):
        raise ConfigError(
            "`local_ranks` share parts of a model in host memory, or all of it in GPUs",
            hint="give `only` or `slices`, or a `device`; pulls of whole models into host memory "
            "share that, or what they read, by themselves",
        )
    if options.strong and options.selection:
        raise ConfigError(
            "`local_ranks` take each other's word, and `verify=strong` takes none",
            hint="leave out one of them",
        )


def _check_follow(reference: ModelReference, asked: PullArguments, device: str) -> None:
    """Raise ConfigError if a pull with these arguments can't follow its model."""
    if device != "cpu" and asked.get("into") is not None:
        raise ConfigError(
            "a pull that follows its model can't fill a GPU's memory, where `into` is",
            hint="leave out `follow`, and pull again when there are new weights",
        )
    for name, given in (
        ("path", asked.get("path") is not None),
        ("fallback", asked.get("fallback") is not None),
        ("source", asked.get("source", PEERS) != PEERS),
        ("out", asked.get("out") is not None),
        ("device", device != "cpu"),
    ):
        if given:
            raise ConfigError(f"a pull with `{name}` can't `follow` its model")
    if reference.pin or reference.revision:
        raise ConfigError("a pinned revision never changes", hint="leave out `follow`")


#: Values of an option that a pull does without.
_UNUSED: tuple[object, ...] = (None, False, [], "cpu")
#: Arguments by what they must be; `_OPTIONAL` ones may be None.
_TEXTS = ("model", "revision", "peer", "coordinator", "transport", "owner", "companion")
_PATHS = ("path", "fallback", "out")
_FLAGS = ("hold", "attach", "resume", "follow", "allow_older", "companions")
_OPTIONAL = ("peer", "coordinator", "transport", "owner", *_PATHS)


def _check_types(given: Mapping[str, object]) -> None:
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


def _check_files_only(options: PullOptions) -> None:
    """Raise ConfigError for what a pull of files only can't do."""
    for name in ("hold", "into", "reuse", "follow", "device"):
        if getattr(options, name) not in _UNUSED:
            raise ConfigError(
                f"`files_only` pulls no weights, so `{name}` has nothing to work on",
                hint=f"leave out `files_only` or `{name}`",
            )
    if options.pin and not options.from_sources:
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

    def make(
        source_id: str, key: ModelKey, manifest: Manifest, pages: Pages, arena: Memory
    ) -> Relay:
        from mx.api.serving import source_options
        from mx.source.relay import Relay

        options = source_options(settings, asked, live=live)
        return Relay(source_id, options, transports(), coordinator, key, manifest, pages, arena)

    return make, ""


def destination(into: object) -> memoryview | InPlace | None:
    """Return what a pull fills: a buffer, or the tensors of a module or a state dict.

    Raises:
        ConfigError: It is none of these, or can't be written to.
    """
    if into is None:
        return None
    from mx.api.tensors import in_place, is_module

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
