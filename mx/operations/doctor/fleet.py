"""Checks of the fleet: the coordinators, and the sources that they list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mx.api.listing import asking
from mx.api.survey import topology
from mx.core import versions
from mx.core.answers import BundleStatus, ModelStatus
from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.errors import (
    MxError,
    NotAllowedError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerUntrustedError,
)
from mx.operations.doctor.findings import ExaminedHost, Finding, failure, note, ok, warning
from mx.text import listed
from mx.units import count
from mx.wire.address import resolve, tls_of
from mx.wire.channel import Remote, Role, dial
from mx.wire.client import CoordinatorClient
from mx.wire.lease import Lease
from mx.wire.listing import SourceStatus
from mx.wire.rpc import Stub
from mx.wire.tls import diagnosing
from mx.wire.v1 import peer_pb2

#: More sources are not called: a coordinator may list very many.
_MOST_CALLED = 64
_AT_ONCE = 16
#: A call that takes longer tells of a coordinator, or a way there, that is overloaded.
_SLOW_S = 0.5
#: A call that looks for it costs a coordinator nothing.
_NO_MODEL = "mx-doctor-asks-for-none"
#: After so long, coordinators of one state list the same sources.
_SETTLES_S = 1.5


@dataclass(frozen=True)
class CoordinatorAnswer:
    """What one coordinator said; `error` is why it did not, `seconds` how long a call took."""

    address: str
    error: MxError | None = None
    seconds: float = 0.0
    models: tuple[ModelStatus, ...] = ()
    bundles: tuple[BundleStatus, ...] = ()
    sources: tuple[SourceStatus, ...] = ()


@dataclass(frozen=True)
class FleetSurvey:
    """What the coordinators said, and which sources answered.

    `called` has, for each endpoint that was called, why it failed (None if it answered as the
    source that is listed), `uncalled` the number of those that were not. `apart` are the addresses
    of coordinators that list sources which another one does not.
    """

    answers: tuple[CoordinatorAnswer, ...] = ()
    called: Mapping[str, MxError | None] = field(default_factory=dict)
    uncalled: int = 0
    apart: tuple[str, ...] = ()

    @property
    def answering(self) -> CoordinatorAnswer | None:
        """The first answer that is none of an error; None if there is none."""
        return next((each for each in self.answers if each.error is None), None)

    @property
    def sources(self) -> tuple[SourceStatus, ...]:
        """The sources that the coordinators list, each once."""
        found = {each.record.source_id: each for said in self.answers for each in said.sources}
        return tuple(found.values())


async def look(subject: ExaminedHost, *, coordinators_only: bool = False) -> FleetSurvey:
    """Ask each coordinator, and call the sources that they list; on the loop. Takes a few of the
    settings' `connect_timeout_s` at most.

    Args:
        subject: Whose fleet it is.
        coordinators_only: Ask no more than shows that coordinators answer, and share a state.
    """
    lists = not coordinators_only or len(subject.coordinators) > 1

    async def ask() -> list[CoordinatorAnswer]:
        each = (_ask(subject, address, lists=lists) for address in subject.coordinators)
        return await asyncio.gather(*each)

    answers = await ask()
    apart = _apart(answers)
    if apart:  # what came or went between the answers is not a difference
        await asyncio.sleep(_SETTLES_S)
        apart = {
            name: ids
            for name, now in _apart(await ask()).items()
            if (ids := now & apart.get(name, set()))
        }
    found = FleetSurvey(tuple(answers), apart=tuple(sorted(apart)))
    if coordinators_only:
        return found
    endpoints = {each.record.endpoint: each.record for each in found.sources}
    chosen = dict(list(endpoints.items())[:_MOST_CALLED])
    turns = asyncio.Semaphore(_AT_ONCE)
    results = await asyncio.gather(
        *(_call(subject, endpoint, record, turns) for endpoint, record in chosen.items())
    )
    called = dict(zip(chosen, results, strict=True))
    return replace(found, called=called, uncalled=len(endpoints) - len(chosen))


async def _ask(subject: ExaminedHost, address: str, *, lists: bool) -> CoordinatorAnswer:
    async def question(client: CoordinatorClient) -> CoordinatorAnswer:
        await _nothing(client)  # this one connects, too
        begun_s = time.monotonic()
        await _nothing(client)
        seconds = time.monotonic() - begun_s
        if not lists:
            return CoordinatorAnswer(address, None, seconds)
        models = tuple(await client.list_models())
        sources, bundles = await client.list_sources(), await client.list_bundles()
        return CoordinatorAnswer(address, None, seconds, models, tuple(bundles), tuple(sources))

    try:
        return await asking(question, address, subject.settings)
    except MxError as error:
        return CoordinatorAnswer(address, error)


async def _nothing(client: CoordinatorClient) -> None:
    """Ask for nothing. Raises NotAllowedError if the coordinator shows us no model at all."""
    try:
        await client.list_sources(_NO_MODEL)
    except NotAllowedError:  # its policy shows us some
        await client.list_models()


def _apart(answers: list[CoordinatorAnswer]) -> dict[str, set[str]]:
    """Return, by coordinator, the sources that others list and it does not."""
    lists = {
        each.address: {status.record.source_id for status in each.sources}
        for each in answers
        if each.error is None
    }
    everything = set().union(*lists.values())
    return {name: lacks for name, ids in lists.items() if (lacks := everything - ids)}


async def _call(
    subject: ExaminedHost, endpoint: str, record: SourceRecord, turns: asyncio.Semaphore
) -> MxError | None:
    """Call a source; return why it does not answer, or None."""
    tls, timeout_s = tls_of(subject.settings), subject.settings.connect_timeout_s
    remote = Remote(Role.SOURCE, endpoint, tls)
    async with turns:
        try:
            channel = dial(endpoint, tls=tls, insecure=subject.settings.insecure)
        except MxError as error:
            return error
        try:
            stub = Stub(channel, peer_pb2.DESCRIPTOR.services_by_name["Peer"], remote)
            async with diagnosing(remote):
                answer = await stub.Describe(peer_pb2.DescribeRequest(), timeout=timeout_s)
                known = {each.source_id for each in answer.sources}
            if record.source_id not in known:  # also where we may not pull it
                lease = Lease(channel, record, lambda: None, tls=tls)
                await lease.open(Place(), [], timeout_s)
                await lease.close()
        except PeerUntrustedError as error:
            return error
        except PeerRefusedError:
            return PeerProtocolError("another process answers there than is listed", peer=endpoint)
        except MxError as error:
            return error
        finally:
            await channel.close(None)
    return None


def coordinators(subject: ExaminedHost, fleet: FleetSurvey) -> Iterator[Finding]:
    """Yield whether each coordinator answers, understands this mx, and is quick."""
    for each in fleet.answers:
        if each.error is None:
            text = (
                f"the coordinator at {each.address} answers in {each.seconds * 1000:.0f} ms, and "
                f"speaks what this mx speaks ({versions.own()})"
            )
            slow = each.seconds > _SLOW_S
            yield warning(f"{text}: that is slow", "see its load and log") if slow else ok(text)
        elif not subject.settings.is_set("coordinator"):
            yield note(
                f"no coordinator was named, and none runs at {each.address}",
                "start mx-coordinator, or name one with `coordinator`; `mx serve` alone is one",
            )
        else:
            fix = each.error.hint if resolve(each.address) else "check the name: it is unknown here"
            say = failure if fleet.answering is None else warning
            yield say(each.error.message, fix)
    for address in fleet.apart:
        yield warning(
            f"the coordinator at {address} does not list all that another one lists",
            "give all of them one `state`, in Redis: clients take any of them",
        )


def models(subject: ExaminedHost, fleet: FleetSurvey) -> Iterator[Finding]:
    """Yield what can be pulled."""
    if fleet.answering is None:
        return
    found = fleet.answering.models
    yield ok(f"{count(len(found), 'model')} and {count(len(fleet.sources), 'source')} listed")
    without = [str(each.model) for each in found if not each.sources]
    if without:
        yield note(f"no source holds {listed(without)} any more")
    lacking = [
        f"{each.name}:{each.revision} ({each.missing_count} of {each.ranks})"
        for each in fleet.answering.bundles
        if each.ranks > 1 and not each.complete
    ]
    if lacking:
        yield warning(
            f"ranks are missing of {listed(lacking)}: replicas that need all of them wait",
            "start the sources of the others: `mx models` names them",
        )


def sources(subject: ExaminedHost, fleet: FleetSurvey) -> Iterator[Finding]:
    """Yield whether the sources answer from here."""
    failed = {endpoint: error for endpoint, error in fleet.called.items() if error is not None}
    answering = len(fleet.called) - len(failed)
    if answering:
        rest = f" ({fleet.uncalled} more were not called)" if fleet.uncalled else ""
        yield ok(f"{count(answering, 'source')} answered from here{rest}")
    alike: dict[str, dict[str, MxError]] = {}  # by what is said of each
    for endpoint, error in failed.items():
        alike.setdefault(error.message.replace(endpoint, "it"), {})[endpoint] = error
    for message, errors in alike.items():
        error = next(iter(errors.values()))
        silent = isinstance(error, PeerLostError | PeerTimeoutError)
        reach = "check its `listen` and `advertise`, firewalls between, and whether it is stopped"
        yield (warning if answering else failure)(
            f"{count(len(errors), 'listed source')} can't be used from here ({message}): "
            f"{listed(list(errors))}",
            reach if silent else error.hint,
        )


def paths(subject: ExaminedHost, fleet: FleetSurvey) -> Iterator[Finding]:
    """Yield whether a transport leads from each source to this host."""
    if fleet.answering is None or not fleet.sources:
        return
    at = fleet.answering.address
    used: set[str] = set()
    apart: dict[str, list[str]] = {}  # the sources that each reason keeps away
    for each in topology(sources=True, coordinator=at, settings=subject.settings).sources:
        plans = each.plans.values()
        chosen = {path.transport for plan in plans for path in plan.chosen}
        used |= chosen
        if not chosen:
            why = sorted({f"{no.transport}: {no.reason}" for plan in plans for no in plan.rejected})
            apart.setdefault("; ".join(why), []).append(each.record.endpoint)
    for reason, endpoints in apart.items():
        where = f"from the {count(len(endpoints), 'source')} at {listed(endpoints)} to this host"
        yield warning(f"no transport leads {where}: {reason}")
    if used:
        yield ok(f"a pull here would read by {listed(sorted(used))}; `mx topo` shows the paths")
