"""Which paths lead from sources to a target, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mx import discovery
from mx.core.locality import with_verified_place
from mx.core.paths import Medium, Path
from mx.core.planner import Plan, plan
from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.fetching.options import PullOptions
from mx.transport import Transport, Unavailable


def path_between(transport: Transport, here: Place, there: Place) -> Path | None:
    """Return the transport's path; where it reaches no GPU, its path to this host's memory, from
    which mx copies to the target's GPU, or between the memories of both hosts: a source that serves
    such a transport copies from its GPU. None if there is none of these."""
    path = transport.reach(here, there)
    if path is not None or here.device == there.device == "cpu":
        return path
    near, far = replace(here, device="cpu"), replace(there, device="cpu")
    if here.device != "cpu":
        path = transport.reach(near, there)
    if path is None and there.device != "cpu":
        path = transport.reach(near, far)
    if path is None:
        return None
    # Any path is better than none, but within the GPU there is a better one.
    not_beside = "the bytes are on this GPU" if here.device == there.device else ""
    return replace(
        path,
        attach=False,
        not_beside=not_beside,
        staged=here.device != "cpu",
        detail=", ".join(filter(None, [path.detail, "staged through host memory"])),
        # Within a machine the way to the GPU is the narrowest part.
        medium=Medium.PCIE if path.medium is Medium.MEMORY else path.medium,
    )


def path_or_reason(
    transport: Transport, here: Place, there: Place, *, trusted_fabric: bool
) -> Path | str:
    """Return the path that a pull may use, or the reason why there is none."""
    path = path_between(transport, here, there)
    if path is None:
        return "it does not reach from here to there"
    if path.trusting and not trusted_fabric:
        return "it enforces no bounds: set `trusted_fabric` if that network can be trusted"
    return path


def plan_paths(
    options: PullOptions,
    place: Place,
    transports: Mapping[str, Transport],
    sources: Sequence[SourceRecord],
) -> Plan:
    """Return the plan over all transports' paths to these sources. Places that sources declare
    count as far as they are verified."""
    transports = {**transports, **options.transport_context.broken}

    def reach(name: str, there: Place) -> Path | str:
        trusted = options.trusted_fabric
        path = path_or_reason(transports[name], place, there, trusted_fabric=trusted)
        if isinstance(path, Path):
            viable = transports[name].probe()
            if isinstance(viable, Unavailable):
                return viable.reason
        return path

    return plan(
        place,
        [with_verified_place(source, place) for source in sources],
        sorted(transports),
        reach,
        forced=options.transport,
        attach=options.attach
        and not options.hold
        and options.into is None
        and options.selection is None,
    )


def target_place(options: PullOptions) -> Place:
    """Return the place where the pull runs, with its interfaces' addresses (a place without any
    looks unreachable). Raises ConfigError for an interface that does not exist."""
    place = discovery.here(options.device, nics=options.nics)
    return replace(place, facts=options.transport_context.facts)
