"""`mx serve --cache`: hold what this host pulls until it is stopped. `mx cache`: what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from mx import packs
from mx.cli import options, outcome
from mx.cli.printing import Column, objects, show_rows, spaced
from mx.cli.stop import Stop
from mx.config import Settings
from mx.core.variant import ProcessingKey
from mx.errors import ConfigError, NoSourceError, PeerLostError
from mx.units import count, format_bytes, format_seconds
from mx.wire.descriptors import raise_limit

if TYPE_CHECKING:
    from mx.core.answers import BundleStatus
    from mx.fleet.caching import Cache
    from mx.wire.cache import CachedModel, CacheStatus

#: The most missing ranks of a bundle that the table names.
_MAX_SHOWN = 8


def _ranks_of(variant: str) -> str:
    """Return the ranks in a processing key, such as "tp=1/2 pp=0/4"."""
    return " ".join(f"{name}={rank}" for name, rank in ProcessingKey.parse(variant).ranks.items())


def _missing(bundle: BundleStatus) -> str:
    if bundle.complete:
        return "complete"
    shown = ", ".join(map(_ranks_of, bundle.missing[:_MAX_SHOWN]))
    return f"missing {shown}" + (" …" if bundle.missing_count > _MAX_SHOWN else "")


BUNDLES: Sequence[Column[BundleStatus]] = (
    Column("model", "", lambda b: b.name),
    Column("revision", "", lambda b: b.revision),
    Column("variant", "", lambda b: b.variant),
    Column("", "bundle", lambda b: spaced(f"{b.name}[{b.variant}]")),
    Column("", "revision", lambda b: b.revision + ("" if b.named else ", by its revision only")),
    Column("ranks", "", lambda b: b.ranks),
    Column("", "ranks", lambda b: f"{b.ranks - b.missing_count} of {b.ranks}"),
    Column("complete", "", lambda b: b.complete),
    Column("missing", "", lambda b: b.missing),
    Column("missing_count", "", lambda b: b.missing_count),
    Column("named", "", lambda b: b.named),
    Column("", "state", _missing),
)


def show_bundles(bundles: Sequence[BundleStatus]) -> None:
    if bundles:
        outcome.write("")
        show_rows(BUNDLES, bundles, "ellipsis")


def _ago(seconds: float) -> str:
    return f"{format_seconds(seconds)} ago"


def _giver(offered: bool) -> str:
    return "a process here" if offered else "sources"


_CACHED: Sequence[Column[CachedModel]] = (
    Column("model", "model", lambda m: m.model.name),
    Column("revision", "revision", lambda m: m.model.revision),
    Column("variant", "variant", lambda m: m.model.variant, spaced),
    Column("pin", "", lambda m: m.ref.pin.hex()),
    Column("bytes", "size", lambda m: m.nbytes, format_bytes, right=True),
    Column("idle_s", "last asked for", lambda m: m.idle_s, _ago, right=True),
    Column("mapped_by", "attached by", lambda m: m.mapped_by, right=True),
    Column("in_use", "", lambda m: m.in_use),
    Column("offered", "from", lambda m: m.offered, _giver),
    Column("endpoint", "", lambda m: m.endpoint),
)


def run_cache(context: typer.Context, *, as_json: bool) -> None:
    settings = options.settings_of(context, runs_long=True, level="info")
    outcome.ignore_hangup()
    raise_limit()
    from mx.fleet.caching import cache

    with options.tracing(settings), options.accompanied(settings):
        stop = Stop()
        running = cache(coordinator=options.coordinator_of(settings), settings=settings)
        with running, stop.on_signals():
            _announce(running, as_json=as_json)
            packs.tell("ready", f"caching at {running.socket}")
            stop.wait()


def _announce(cache: Cache, *, as_json: bool) -> None:
    budget_bytes = cache.status().budget_bytes
    if as_json:
        outcome.emit(
            {
                "cache": str(cache.socket),
                "memory_bytes": budget_bytes,
                "coordinator": cache.coordinator_address,
                "embedded": cache.embedded,
            }
        )
    where = "itself, at" if cache.embedded else "the one at"
    outcome.say(
        f"caching up to {format_bytes(budget_bytes)} of what this host pulls\n"
        f"  at {cache.socket}, coordinator: {where} {cache.coordinator_address}\n"
        f"  stop with Ctrl-C"
    )


@options.takes_settings
def cache(
    settings: Settings,
    *,
    as_json: bool,
) -> None:
    """Show what this host's cache holds, the least recently used first.

    A model that processes have mapped stays in the cache; others leave it when there is no room.
    `mx serve --cache` starts a cache.

    **Example**

    - `mx cache`
    """
    if settings.cache_socket == "off":
        raise ConfigError(
            f"{settings.origin('cache_socket')} switches the cache off",
            hint="give --cache-socket auto, or its path",
        )
    from mx.fleet.caching import cached
    from mx.wire.private import cache_socket as path_of

    where = path_of(settings.cache_socket)
    hint = "start one with mx serve --cache --memory 64GB"
    try:
        found = cached(settings=settings)
    except PeerLostError as error:
        raise NoSourceError(
            f"no cache runs at {where}; the one whose socket this is was killed", hint=hint
        ) from error
    if found is None:
        raise NoSourceError(f"no cache runs at {where}", hint=hint)
    if as_json:
        outcome.emit(_object(str(where), found))
        return
    lingering = ""
    if found.lingering_bytes:
        lingering = f" ({format_bytes(found.lingering_bytes)} were evicted and are still mapped)"
    outcome.write(
        f"{format_bytes(found.held_bytes + found.lingering_bytes)} of "
        f"{format_bytes(found.budget_bytes)} used{lingering}, "
        f"{count(len(found.models), 'model')}, {count(found.evictions, 'eviction')}, at {where}"
    )
    if not found.models:
        return
    outcome.write("")
    show_rows(_CACHED, found.models, "ellipsis")


def _object(where: str, status: CacheStatus) -> dict[str, object]:
    return {
        "cache": where,
        "memory_bytes": status.budget_bytes,
        "held_bytes": status.held_bytes,
        "lingering_bytes": status.lingering_bytes,
        "evictions": status.evictions,
        "models": objects(_CACHED, status.models),
    }
