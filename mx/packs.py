"""What packs add to mx, beside its kernel: verbs, flags, settings, states, names in Python.

A pack is a package with one table, a `Pack`. Installed, each is named in its distribution's
metadata under `mx.packs`; those of mx are found by name, too, as far as they are there. A table
names what it adds as "module:attribute", which is imported when it is asked for. docs/packs.md
makes one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mx.config_values import SettingDescription
from mx.errors import MxError

_OWN = "mx_peer-"

#: What a module that does not suit this machine or version raises while it is imported.
LOAD_FAILURES = (
    MxError,
    ImportError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    OSError,
    RuntimeError,
    AssertionError,
)

GROUP = "mx.packs"
#: Also what the distribution's own metadata says; "module:attribute".
BUILT_IN = {
    "artifacts": "mx.artifacts:PACK",
    "fleet": "mx.fleet:PACK",
    "kv": "mx.kv:PACK",
    "operations": "mx.operations:PACK",
    "redis": "mx.redis_state:PACK",
    "snapshots": "mx.snapshots:PACK",
}

#: The settings that verbs take which ask a coordinator, and which log: for `Pack.takes`.
ASKING = ("coordinator", "tls_cert", "tls_key", "tls_ca", "tls_crl", "insecure")
LOGGING = ("log_level", "log_format")


@dataclass(frozen=True)
class Pack:
    """What a pack adds. Where two add the same, the first has it, and mx's own come first."""

    #: Attributes of `mx`, each with the module that has it.
    names: Mapping[str, str] = field(default_factory=dict)
    #: Modules that are attributes of `mx`, by their name there.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: Verbs of `mx`, each a function as `mx.cli.options.takes_settings` makes it, or a Typer.
    verbs: Mapping[str, str] = field(default_factory=dict)
    #: By the name of one of the kernel's verbs, an object that adds flags to it: see
    #: `mx.cli.additions`.
    additions: Mapping[str, str] = field(default_factory=dict)
    #: Settings, which `Settings.value` returns.
    settings: Mapping[str, SettingDescription] = field(default_factory=dict)
    #: By verb, the names of the settings whose flags it takes.
    takes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: By the scheme of the URL that `state` has, a `mx.coordinator.state.SharedState`.
    states: Mapping[str, str] = field(default_factory=dict)
    #: Functions that are told of what a command does: "ready" with what it serves, for people, in
    #: one line; "stopping".
    listeners: Sequence[str] = ()
    #: Functions of the settings and the coordinator, if the command is one, that return a context
    #: manager, each with the names of its settings. Commands that serve are in it while they do;
    #: one that ends by itself refuses the flags of these.
    contexts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Functions that return a `mx.wire.server.Service` which every process that serves answers,
    #: beside `Peer`. They get the process's `mx.source.server.SourceServer`.
    services: Sequence[str] = ()
    #: By the name of a transport of another distribution than mx, a function that returns what that
    #: transport says of this process in its `Place`: bytes, at most MAX_FACT_BYTES, or b"". It gets
    #: what returns the value of a setting by its name. It is called once for each pull and source,
    #: also where the transport is not used, and does not block.
    facts: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def packs() -> Mapping[str, Pack]:
    """Return the packs that are there by name, mx's own first. One that can't be imported is left
    out, with a warning."""
    found: dict[str, Pack] = {}
    for name, imported in targets(GROUP, BUILT_IN):
        if name not in found and (pack := _pack(name, imported)) is not None:
            found[name] = pack
    return found


def _pack(name: str, imported: Any) -> Pack | None:
    try:
        pack = imported()
        why = "its entry point names no mx.packs.Pack"
    except LOAD_FAILURES as error:
        missing = getattr(error, "name", None) or "?"
        if isinstance(error, ModuleNotFoundError) and BUILT_IN.get(name, "").startswith(missing):
            return None  # it is not installed
        pack, why = None, f"{type(error).__name__}: {error}"
    if isinstance(pack, Pack):
        return pack
    warn(f"the pack {name}", why)
    return None


def warn(what: str, why: str) -> None:
    """Log that something of another distribution is left out, and why."""
    import logging

    logging.getLogger(__name__).warning("%s is left out: %s", what, why)


def find(kind: str, name: str) -> Any:
    """Import and return what packs add under a name; None if none adds it.

    Args:
        kind: A field of `Pack` that is a mapping to "module:attribute".
        name: The name in it.
    """
    for pack in packs().values():
        if name in getattr(pack, kind):
            return load(getattr(pack, kind)[name])
    return None


def optional(target: str) -> Any:
    """Import and return what "module:attribute" of one of mx's own packs names; None where that
    pack is not there."""
    try:
        return load(target)
    except ModuleNotFoundError as error:
        if error.name is None or not target.startswith(error.name):
            raise
        return None


def attribute(name: str) -> Any:
    """Import and return what packs add to `mx` under a name.

    Raises:
        AttributeError: None of them does.
    """
    for pack in packs().values():
        if name in pack.modules:
            return importlib.import_module(pack.modules[name])
        if name in pack.names:
            return getattr(importlib.import_module(pack.names[name]), name)
    raise AttributeError(f"module 'mx' has no attribute {name!r}")


def each(kind: str) -> Iterator[Any]:
    """Import and yield what packs add.

    Args:
        kind: A field of `Pack` of which each item, or key, is "module:attribute".
    """
    for pack in packs().values():
        for target in getattr(pack, kind):
            yield load(target)


def tell(event: str, text: str = "") -> None:
    """Call the listeners of packs; see `Pack.listeners`. What one raises is logged."""
    for listener in each("listeners"):
        try:
            listener(event, text)
        except Exception:  # the command goes on: it serves, and only this is not told
            import logging

            logging.getLogger(__name__).exception("a listener of a pack failed: %s", listener)


# -- what other distributions add, found without reading all metadata ------------------------------


def targets(group: str, built_in: dict[str, str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is there of a group, the built-in first, without importing any.

    Args:
        group: The group of entry points.
        built_in: "module:attribute" by name. A plain checkout has no metadata, so that what is
            mx's own is named in a table.

    Returns:
        Pairs of a name and a callable that imports what it stands for.
    """
    for name, target in built_in.items():
        yield name, functools.partial(load, target)
    declared = _declared(tuple(sys.path))
    if declared is None or any(b"[%s]" % group.encode() in each for each in declared):
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
            yield entry.name, entry.load


def load(target: str) -> Any:
    """Import and return what "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@functools.lru_cache(maxsize=4)
def _declared(places: tuple[str, ...]) -> tuple[bytes, ...] | None:
    """Return the entry points of other distributions that name a group of mx's; None if only the
    library can read them. The files are looked for here, since `importlib.metadata` takes 12 ms to
    import and reads all files of metadata."""
    declared = []
    for place in places:
        try:
            with os.scandir(place or ".") as entries:
                found = [
                    each.path for each in entries if each.name.endswith((".dist-info", ".egg-info"))
                ]
        except NotADirectoryError:
            return None  # an archive
        except OSError:
            continue
        for folder in found:
            if not os.path.basename(folder).startswith(_OWN):
                with contextlib.suppress(OSError), open(f"{folder}/entry_points.txt", "rb") as file:
                    text = file.read()
                    if b"[mx." in text:
                        declared.append(text)
    return tuple(declared)
