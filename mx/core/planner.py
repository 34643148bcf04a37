"""Which sources and paths a pull uses, which it keeps in reserve, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mx.core.paths import Medium, Path, Rail, nic_gb_per_s, rails
from mx.core.reasons import PathReason, Why
from mx.core.topology import Place
from mx.core.types import SourceRecord, SourceState

#: A path that would add less than this part of the best one's bandwidth is not worth its cost.
WORTH = 0.05
#: Media that are links of GPUs.
_LINKS = (Medium.NVLINK, Medium.PCIE)
#: Sources that one pull reads from at a time, by itself; in a swarm there are more.
MOST_SOURCES = 4


class SourcePath(NamedTuple):
    """One path to one source, as a transport found it; over the network, one for each rail
    (None: whatever the kernel routes)."""

    source: SourceRecord
    transport: str
    gb_per_s: float
    attach: bool
    detail: str
    medium: Medium = Medium.MEMORY
    rail: Rail | None = None
    staged: bool = False  # through this host's memory to the GPU: the transport can't do it
    not_beside: str = ""  # as `Path` has it
    link: str = ""  # of the target's GPU, by which the bytes come; "" for no link of its own

    @property
    def label(self) -> str:
        """The path's name among those to its source: "tcp", "ucx eth0→eth1"."""
        return self.transport if self.rail is None else f"{self.transport} {self.rail}"

    @property
    def bottleneck(self) -> tuple[object, ...]:
        """What the path shares with others of the same value: one of them is enough."""
        if self.link:
            return (self.link,)
        if self.medium is Medium.NETWORK:
            ends = (self.rail.local_address, self.rail.remote_address) if self.rail else ()
            return (self.source.key, self.medium, *ends)
        return (self.source.key, self.medium)


class Spare(NamedTuple):
    """A path that works, and is not used as long as the chosen ones work."""

    path: SourcePath
    reason: PathReason


class RejectedPath(NamedTuple):
    """A transport that does not lead to a source."""

    source: SourceRecord
    transport: str
    reason: PathReason

    @property
    def unasked(self) -> bool:
        """Return True if the user named another one."""
        return self.reason.why is Why.UNASKED

    def __str__(self) -> str:
        return f"{self.source.endpoint}: skipped {self.transport}: {self.reason}"


class Plan(NamedTuple):
    """The paths of a pull: `chosen` are used at once, `spare` when those are lost; both best first.
    `rejected` can't be used."""

    chosen: tuple[SourcePath, ...]
    spare: tuple[Spare, ...]
    rejected: tuple[RejectedPath, ...]

    @property
    def paths(self) -> tuple[SourcePath, ...]:
        """All paths that work, best first."""
        return (*self.chosen, *(spare.path for spare in self.spare))

    @property
    def gb_per_s(self) -> float:
        """The expected bandwidth of the chosen paths together."""
        return sum(path.gb_per_s for path in self.chosen)

    def shares(self, nbytes: int) -> tuple[int, ...]:
        """Return how much of `nbytes` each chosen path should carry: in proportion to its
        bandwidth, so that all end together. (Over a path that attaches nothing is carried.)"""
        total = self.gb_per_s
        if not self.chosen or total <= 0:
            return tuple(0 for _ in self.chosen)
        parts = [int(nbytes * path.gb_per_s / total) for path in self.chosen]
        parts[0] += nbytes - sum(parts)
        return tuple(parts)

    def why_none(self) -> str:
        """Return why no path works; leave out transports other than the one that the user named."""
        return "; ".join(str(each) for each in self.rejected if not each.unasked)


#: (transport name, source's place) -> the path there, or the reason why there is none.
Reach = Callable[[str, Place], Path | str]


def plan(
    here: Place,
    sources: Iterable[SourceRecord],
    transports: Sequence[str],
    reach: Reach,
    *,
    forced: str | None = None,
    attach: bool = True,
) -> Plan:
    """Rank the paths over every (source, transport, rail), and choose those to be used at once.

    Serving sources come before draining ones, then paths that attach, then faster ones; equal ones
    are ranked by source id, transport and rail, so that the same input gives the same plan. Beside
    the best path those are chosen that share no bottleneck with it and add enough bandwidth: others
    to its source, over the network some to sources on other hosts, and into a GPU some to sources
    on its host whose bytes come by another link.

    Args:
        here: The target's place.
        sources: The sources.
        transports: The names of this process's transports.
        reach: Returns the path of a transport to a place, or why there is none.
        forced: The only transport to use.
        attach: False: a path that could attach is used to copy. So it is where the source's memory
            is not what the target's would be, and may change.
    """
    paths: list[SourcePath] = []
    rejected: list[RejectedPath] = []
    for source in sources:
        for name in transports:
            if forced is not None and name != forced:
                rejected.append(RejectedPath(source, name, Why.UNASKED(forced)))
                continue
            if name not in source.transports:
                rejected.append(RejectedPath(source, name, Why.UNSERVED()))
                continue
            answer = reach(name, source.place)
            if isinstance(answer, str):
                rejected.append(RejectedPath(source, name, Why.TRANSPORT(answer)))
            else:
                table = source.table  # readers attach to scattered memory only if it is frozen
                attaches = attach and (table.frozen or not table.scattered)
                paths += _paths(here, source, answer, attaches)
    paths.sort(key=_rank)
    chosen: list[SourcePath] = []
    spare: list[Spare] = []
    for path in paths:
        reason = why_not(path, chosen)
        if reason is None:
            chosen.append(path)
        else:
            spare.append(Spare(path, reason))
    return Plan(tuple(chosen), tuple(spare), tuple(rejected))


def _paths(here: Place, source: SourceRecord, path: Path, attach: bool) -> Iterator[SourcePath]:
    found: list[Rail | None] = []
    if path.medium is Medium.NETWORK:
        found += rails(here, source.place)
    for rail in found or [None]:
        rate, detail = path.gb_per_s, path.detail
        if rail is not None:
            if rail.rdma and path.rdma_gb_per_s:
                rate, detail = path.rdma_gb_per_s, path.rdma_detail
            rate = min(rate, rail.gb_per_s)
        elif path.medium is Medium.NETWORK and here.nics:
            # Whatever interfaces the source declares, the bytes arrive by one of these.
            rate = min(rate, max(nic_gb_per_s(nic) for nic in here.nics))
        yield SourcePath(
            source,
            path.transport,
            rate,
            path.attach and attach,
            detail,
            path.medium,
            rail,
            path.staged,
            path.not_beside,
            _link(here, source.place, path.medium) if path.medium in _LINKS else "",
        )


def _link(here: Place, there: Place, medium: Medium) -> str:
    """Return the link of the target's GPU that bytes of another GPU come by: its slot, its lanes to
    that GPU, or all of its lanes, where they lead to switches; "" for none. (Host memory would have
    to be pinned, for little beside a GPU.)"""
    gpu = here.gpu
    if gpu is None or there.device == "cpu":
        return ""
    apart = sum(peer.nvlinks for peer in gpu.peers) <= gpu.nvlinks  # else each reaches all others
    return f"nvlink {there.device}" if medium is Medium.NVLINK and apart else medium.value


def _rank(path: SourcePath) -> tuple[object, ...]:
    return (
        path.source.state is not SourceState.SERVING,
        not path.attach,
        -path.gb_per_s,
        path.source.key,
        path.transport,
        str(path.rail or ""),
        path.rail.remote_address if path.rail else "",
    )


def _why_not_another_source(path: SourcePath, chosen: Sequence[SourcePath]) -> PathReason | None:
    """Return why a path to another source is not used; None if it is. A second source is of use
    where the network connection of the source is the bottleneck, or the link into the GPU."""
    best = chosen[0]
    if path.link and best.link and not path.not_beside:
        shares = any(other.link == path.link for other in chosen)
    else:
        shares = not (path.medium is best.medium is Medium.NETWORK) or best.attach
        shares |= any(_host(other.source) == _host(path.source) for other in chosen)
    if shares:
        nearer = Why.NEARER if best.gb_per_s > path.gb_per_s else Why.AS_NEAR
        return nearer(best.source.endpoint)
    if len({other.source.key for other in chosen}) >= MOST_SOURCES:
        return Why.ENOUGH(MOST_SOURCES)
    if path.source.state is not SourceState.SERVING:
        return Why.DRAINING(path.source.endpoint)
    return None


def _host(source: SourceRecord) -> tuple[str, int, str]:
    """Return what identifies a source's host: of one host's sources a pull reads from one. The
    endpoint's host is part of it, so that a false place does not keep other hosts' sources out."""
    host = source.endpoint.rpartition(":")[0]
    return (source.place.boot_id, source.place.net_namespace, host)


def why_not(path: SourcePath, chosen: Sequence[SourcePath]) -> PathReason | None:
    """Return why a path is not used beside the chosen ones (the best first); None if it is."""
    if not chosen:
        return None
    best = chosen[0]
    if path.source.key not in {other.source.key for other in chosen}:
        reason = _why_not_another_source(path, chosen)
        if reason is not None:
            return reason
    elif best.attach:
        return Why.ATTACHES(best.label)
    elif path.not_beside:
        return Why.TRANSPORT(path.not_beside)
    for other in chosen:
        if other.bottleneck == path.bottleneck:
            faster = Why.FASTER if other.gb_per_s > path.gb_per_s else Why.AS_FAST
            return faster(other.label, other.medium.value)
    if Medium.NETWORK in (path.medium, best.medium) and path.medium is not best.medium:
        inner = path if best.medium is Medium.NETWORK else best
        return Why.WITHIN(inner.label)
    if path.gb_per_s < WORTH * best.gb_per_s:
        return Why.LITTLE(WORTH, best.label)
    return None
