"""How long a pull would take at several places: what `Router.estimate` and `place` answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mx import config, discovery
from mx.api.common import check_type, transports
from mx.core.estimates import Estimate, Size, SourceLoad, estimate
from mx.core.locality import with_verified_place
from mx.core.planner import plan
from mx.core.reference import ModelReference
from mx.core.topology import Place
from mx.core.types import Layout, ModelKey, SourceRecord
from mx.errors import ConfigError
from mx.fetching.paths import path_or_reason
from mx.fetching.resolver import describe
from mx.fleet.allowed import AllowedHosts
from mx.plugins import transport_context
from mx.runtime import in_thread
from mx.transport import Path, Unavailable
from mx.wire.address import tls_of
from mx.wire.client import CoordinatorClient
from mx.wire.listing import Overview
from mx.wire.locate import LocateRequest, Locator
from mx.wire.place import place_from_json


@dataclass(frozen=True)
class _At:
    """Where a pull would run: the host's name for messages, its place, whether it is this host."""

    host: str
    place: Place
    here: bool


@dataclass(frozen=True)
class _Facts:
    """The state of a model at the time of a question."""

    model: ModelKey
    size: Size
    sources: tuple[SourceRecord, ...]
    known: Overview
    rates: dict[str, dict[str, float]]  # GB/s by the reader's host, then by the source's


async def estimates(
    client: CoordinatorClient,
    coordinator: str,
    settings: config.Settings,
    wanted: ModelReference,
    hosts: Sequence[str | Place],
    *,
    attach: bool,
    allow: AllowedHosts | None,
) -> list[Estimate]:
    """Return an estimate for each of several places, in their order.

    Args:
        client: The coordinator.
        coordinator: Its address.
        settings: How it is reached, and which paths are allowed.
        wanted: The model.
        hosts: The places; see `Router.estimate`.
        attach: Whether memory may be shared.
        allow: The hosts that are allowed; None: all.

    Raises:
        MxError: As `Router.estimate`.
    """
    facts = await _facts(client, coordinator, settings, wanted, allow)
    places = await _places(client, hosts, settings, allow)
    trusted = settings.trusted_fabric
    # A thousand places take a while: off the loop, which has leases to renew.
    return await in_thread(
        lambda: [_estimate(facts, each, trusted=trusted, attach=attach) for each in places]
    )


async def _facts(
    client: CoordinatorClient,
    coordinator: str,
    settings: config.Settings,
    wanted: ModelReference,
    allow: AllowedHosts | None,
) -> _Facts:
    where = settings.fill(
        LocateRequest,
        name=wanted.pinned_name,
        revision=wanted.revision,
        variant=wanted.variant,
        coordinator=coordinator,
        tls=tls_of(settings),
    )
    async with Locator(where) as locator:
        located, manifest = await describe(locator)
    sources = [
        each for each in located.sources if allow is None or allow.allows_endpoint(each.endpoint)
    ]
    hosts = {record.endpoint.rpartition(":")[0] for record in sources}
    known, measured = await asyncio.gather(
        client.overview(wanted.name), client.list_rates(sorted(hosts)[:256])
    )
    rates: dict[str, dict[str, float]] = {}
    for each in measured:
        rates.setdefault(each.host, {})[each.source_host] = each.gb_per_s
    whole = tuple(source for source in sources if source.whole)
    return _Facts(
        located.model,
        _size(manifest.layout),
        whole or tuple(sources),
        known,
        rates,
    )


async def _places(
    client: CoordinatorClient,
    hosts: Sequence[str | Place],
    settings: config.Settings,
    allow: AllowedHosts | None,
) -> list[_At]:
    here = await in_thread(discovery.here, nics=settings.nics)
    here = replace(here, facts=transport_context(settings).facts)
    listed: list[SourceRecord] = []
    if any(isinstance(host, str) and host for host in hosts):
        listed = [status.record for status in await client.list_sources()]
    found = [_place(host, here, listed) for host in hosts]
    for each in found:
        hosts_of = (each.host, *each.place.addresses)
        if allow is not None and not each.here and not any(map(allow.allows, hosts_of)):
            raise ConfigError(
                f"{each.host[:80]!r} is not a host that `allow` of the router names",
                hint="add it there, or leave it out here",
            )
    return found


def _estimate(facts: _Facts, at: _At, *, trusted: bool, attach: bool) -> Estimate:
    host, place, here = at.host, at.place, at.here
    known = transports()

    def reach(name: str, there: Place) -> Path | str:
        path = path_or_reason(known[name], place, there, trusted_fabric=trusted)
        if isinstance(path, Path) and here:  # elsewhere it can't be tried
            viable = known[name].probe()
            if isinstance(viable, Unavailable):
                return viable.reason
        return path

    sources = [with_verified_place(source, place) for source in facts.sources]
    found = plan(place, sources, sorted(known), reach, attach=attach)
    chosen = {path.source.source_id for path in found.chosen}
    loads = {
        status.record.source_id: SourceLoad(status.readers, status.gb_per_s)
        for status in facts.known.sources
        if status.record.source_id in chosen
    }
    arriving = [
        (pull.nbytes - pull.done_bytes) / max(pull.gb_per_s * 1e9, 1.0)
        for pull in facts.known.pulls
        if pull.pull_id in chosen
    ]
    return estimate(
        facts.model,
        host,
        facts.size,
        found,
        measured=_measured(facts, place),
        loads=loads,
        arriving_s=max(arriving, default=0.0),
    )


def _measured(facts: _Facts, place: Place) -> dict[str, float]:
    """Return the rates at a place, which coordinators know by its name or an address of it."""
    hosts = (*place.addresses, place.hostname)
    return {s: rate for host in hosts for s, rate in facts.rates.get(host, {}).items()}


def _size(layout: Layout) -> Size:
    sizes = [sum(nbytes for _, nbytes in layer.extents) for layer in layout.layers]
    return Size(sum(sizes), next((nbytes for nbytes in sizes if nbytes), 0))


def _place(host: str | Place, here: Place, listed: Sequence[SourceRecord]) -> _At:
    if isinstance(host, str) and host in ("", here.hostname):
        return _At(here.hostname, here, here=True)
    place: Place | None = host if isinstance(host, Place) else None
    if place is None:
        check_type("at", host, str, "it is a host's name, HOST:PORT of a source, or a Place")
        place = _read(str(host)) if str(host).startswith("{") else _listed(str(host), listed)
    name = host if isinstance(host, str) and not host.startswith("{") else place.hostname
    return _At(name or "there", place, here=place.same_host_key == here.same_host_key)


def _read(text: str) -> Place:
    try:
        return place_from_json(text)
    except ValueError as error:
        raise ConfigError(f"`at` is not a place: {error}", hint="give a Place's JSON") from None


def _listed(host: str, listed: Sequence[SourceRecord]) -> Place:
    for each in listed:
        if host in (each.endpoint, each.endpoint.rpartition(":")[0], each.place.hostname):
            return each.place
    raise ConfigError(
        f"nothing is known of the host {host[:80]!r}: no source is listed there",
        hint="give its Place, which `mx.topology().topology.place` is on that host",
    )
