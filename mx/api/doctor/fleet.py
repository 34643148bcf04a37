"""Checks of the fleet: the coordinators, and the sources that they list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mx.api.common import tls_of
from mx.api.doctor.findings import Finding, Level, Subject
from mx.api.listing import asking
from mx.core import versions
from mx.core.answers import BundleStatus, ModelStatus
from mx.errors import MxError, PeerLostError, PeerProtocolError, PeerTimeoutError
from mx.text import listed
from mx.units import count
from mx.wire.address import resolve
from mx.wire.channel import Remote, Role, dial
from mx.wire.client import CoordinatorClient
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
class Answer:
    """What one coordinator said; `error` is why it did not, `seconds` how long a call took."""

    address: str
    error: MxError | None = None
    seconds: float = 0.0
    models: tuple[ModelStatus, ...] = ()
    bundles: tuple[BundleStatus, ...] = ()
    sources: tuple[SourceStatus, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """What the coordinators said, and which sources answered.

    `called` has, for each endpoint that was called, why it failed (None if it answered as the
    source that is listed), `uncalled` the number of those that were not. `apart` are the addresses
    of coordinators that list sources which another one does not.
    """

    answers: tuple[Answer, ...] = ()
    called: Mapping[str, MxError | None] = field(default_factory=dict)
    uncalled: int = 0
    apart: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[SourceStatus, ...]:
        """The sources that the coordinators list, each once."""
        found = {each.record.source_id: each for said in self.answers for each in said.sources}
        return tuple(found.values())


async def look(subject: Subject, *, coordinators_only: bool = False) -> Fleet:
    """Ask each coordinator, and call the sources that they list; on the loop. Takes a few of the
    settings' `connect_timeout_s` at most.

    Args:
        subject: Whose fleet it is.
        coordinators_only: Ask no more than shows that coordinators answer, and share a state.
    """
    lists = not coordinators_only or len(subject.coordinators) > 1
    answers = await asyncio.gather(
        *(_ask(subject, each, lists=lists) for each in subject.coordinators)
    )
    apart = _apart(answers)
    if apart:  # what came or went between the answers is no difference
        await asyncio.sleep(_SETTLES_S)
        again = await asyncio.gather(
            *(_ask(subject, each, lists=lists) for each in subject.coordinators)
        )
        apart = {name: ids for name, now in _apart(again).items() if (ids := now & apart[name])}
    found = Fleet(tuple(answers), apart=tuple(sorted(apart)))
    if coordinators_only:
        return found
    endpoints = {each.record.endpoint: each.record.source_id for each in found.sources}
    chosen = dict(list(endpoints.items())[:_MOST_CALLED])
    turns = asyncio.Semaphore(_AT_ONCE)
    results = await asyncio.gather(
        *(_call(subject, endpoint, source_id, turns) for endpoint, source_id in chosen.items())
    )
    called = dict(zip(chosen, results, strict=True))
    return Fleet(found.answers, called, len(endpoints) - len(chosen), found.apart)


async def _ask(subject: Subject, address: str, *, lists: bool) -> Answer:
    async def question(client: CoordinatorClient) -> Answer:
        await client.list_sources(_NO_MODEL)  # this one connects, too
        begun_s = time.monotonic()
        await client.list_sources(_NO_MODEL)
        seconds = time.monotonic() - begun_s
        if not lists:
            return Answer(address, None, seconds)
        models = tuple(await client.list_models())
        sources, bundles = await client.list_sources(), await client.list_bundles()
        return Answer(address, None, seconds, models, tuple(bundles), tuple(sources))

    try:
        return await asking(question, address, subject.settings)
    except MxError as error:
        return Answer(address, error)


def _apart(answers: list[Answer]) -> dict[str, set[str]]:
    """Return, by coordinator, the sources that others list and it does not."""
    lists = {
        each.address: {status.record.source_id for status in each.sources}
        for each in answers
        if each.error is None
    }
    everything = set().union(*lists.values())
    return {name: lacks for name, ids in lists.items() if (lacks := everything - ids)}


async def _call(
    subject: Subject, endpoint: str, source_id: str, turns: asyncio.Semaphore
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
        except MxError as error:
            return error
        finally:
            await channel.close(None)
    if source_id not in known:
        return PeerProtocolError("another process answers there than is listed", peer=endpoint)
    return None


def coordinators(subject: Subject, fleet: Fleet) -> Iterator[Finding]:
    """Whether each coordinator answers, understands this mx, and is quick."""
    any_answers = any(each.error is None for each in fleet.answers)
    for each in fleet.answers:
        if each.error is None:
            text = (
                f"the coordinator at {each.address} answers in {each.seconds * 1000:.0f} ms, and "
                f"speaks what this mx speaks ({versions.own()})"
            )
            if each.seconds > _SLOW_S:
                yield Finding(Level.WARNING, f"{text}: that is slow", "look at its CPU and its log")
            else:
                yield Finding(Level.OK, text)
        elif not subject.settings.is_set("coordinator"):
            yield Finding(
                Level.NOTE,
                f"no coordinator was named, and none runs at {each.address}",
                "start mx-coordinator, or name one with `coordinator`; `mx serve` alone is one",
            )
        else:
            host = each.address if resolve(each.address) else ""
            fix = each.error.hint if host else "check the name: it is not known to this host"
            level = Level.WARNING if any_answers else Level.FAILURE
            yield Finding(level, each.error.message, fix)
    for address in fleet.apart:
        yield Finding(
            Level.WARNING,
            f"the coordinator at {address} does not list all that another one lists",
            "give all of them one `state`, in Redis: clients take any of them",
        )


def models(subject: Subject, fleet: Fleet) -> Iterator[Finding]:
    """What can be pulled."""
    answer = next((each for each in fleet.answers if each.error is None), None)
    if answer is None:
        return
    without = [str(each.model) for each in answer.models if not each.sources]
    yield Finding(
        Level.OK,
        f"{count(len(answer.models), 'model')} and {count(len(fleet.sources), 'source')} listed",
    )
    if without:
        yield Finding(
            Level.NOTE,
            f"no source holds {listed(without)} any more",
            "the name is kept for its owner for a while; then it is free",
        )
    for bundle in answer.bundles:
        if not bundle.complete:
            yield Finding(
                Level.WARNING,
                f"{bundle.name}:{bundle.revision} lacks {bundle.missing_count} of {bundle.ranks} "
                "ranks: replicas that need all of them wait",
                "start the sources of the others: `mx models` names them",
            )


def sources(subject: Subject, fleet: Fleet) -> Iterator[Finding]:
    """Whether the sources answer from here."""
    failed = {endpoint: error for endpoint, error in fleet.called.items() if error is not None}
    answering = len(fleet.called) - len(failed)
    if answering:
        rest = f" ({fleet.uncalled} more were not called)" if fleet.uncalled else ""
        yield Finding(Level.OK, f"{count(answering, 'source')} answered from here{rest}")
    for endpoint, error in failed.items():
        yield Finding(
            Level.WARNING if answering else Level.FAILURE,
            f"the source at {endpoint} is listed, and can't be used from here: {error.message}",
            "check its `listen` and `advertise`, firewalls between, and whether it is stopped"
            if isinstance(error, PeerLostError | PeerTimeoutError)
            else error.hint,
        )
