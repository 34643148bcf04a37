"""What a caller learns of models, hosts and pulls that its rights do not show it: nothing, by any
call of a coordinator or a source."""

from __future__ import annotations

import ast
import asyncio
import inspect
import shutil
import socket
import ssl
import urllib.error
import urllib.request
import uuid
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from mx import codec, discovery
from mx.coordinator import listings, progress, service
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey, Registration
from mx.errors import (
    NotAllowedError,
    PeerUntrustedError,
    UnknownModelError,
    UnknownSourceError,
)
from mx.wire.channel import Remote, Role, cut, dial, translating
from mx.wire.client import CoordinatorClient
from mx.wire.lease import Lease
from mx.wire.listing import WatchKind
from mx.wire.rpc import Stub
from mx.wire.v1 import coordinator_pb2 as pb
from mx.wire.v1 import peer_pb2
from tests.support.commands import free_port
from tests.support.policy_site import (
    MODEL,
    OBSERVE,
    PULL,
    SERVE,
    Site,
    authority,
    listed,
    registrable,
    site,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]

__all__ = ["authority", "site"]  # fixtures

SECRET = "team-b/secret-merger-7b"
#: "source" and "reader" are of one team, "stranger" and "holder" of another.
POLICY = """
[[allow]]
principal = ["spiffe://mx.test/ns/a/sa/source", "spiffe://mx.test/ns/a/sa/reader"]
may = ["serve", "pull", "observe", "take-requests"]
models = "team-a/*"

[[allow]]
principal = ["spiffe://mx.test/ns/b/sa/other", "spiffe://mx.test/ns/c/sa/reader"]
may = ["serve", "pull", "observe"]
models = "team-b/*"
"""


def _pull(name: str, done: int, endpoint: str, pull_id: str) -> PullStatus:
    running, key = PullPhase.RUNNING, ModelKey(name, "main", "checkpoint")
    return PullStatus(
        *(pull_id, key, "gpu7.b", 1, running, 4, 0, 10**14, done, 1.0),
        sources=(endpoint,),
        measured_host="forged",
    )


async def _reported(client: CoordinatorClient, name: str, endpoint: str) -> str:
    """Report a pull that reads 8 TB/s for as long as it takes to be measured, and return its id."""
    pull_id = str(uuid.uuid4())
    async with client.reporting() as tell:
        for second in range(8):
            await tell(_pull(name, second * 2 * 10**12, endpoint, pull_id))
            await asyncio.sleep(0.5)
    return pull_id


async def test_no_answer_names_what_the_caller_does_not_see(site: Site) -> None:
    site.policy.write_text(POLICY)
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy), "--lease-s", "300")
    names = ("source", "stranger", "holder")
    ours, theirs, puller = (CoordinatorClient(site.address, tls=site.files(name)) for name in names)
    made, record, secret = registrable()
    record = replace(record, model=record.model._replace(name=SECRET))
    source_id, endpoint = record.source_id, record.endpoint
    said: list[str] = []

    async def refused(kind: type[Exception], asking: object) -> None:
        with pytest.raises(kind) as error:
            await asking  # type: ignore[misc]
        said.append(str(error.value))

    async with AsyncExitStack() as ends, asyncio.timeout(90):
        for client in (ours, theirs, puller):
            ends.push_async_callback(client.close)
        await theirs.register(Registration(record, secret), made)
        assert (await puller.resolve(SECRET)).sources == [record]
        watch, rows = ours.watch(), ours.watch(pulls=True)
        await ends.enter_async_context(aclosing(watch))
        await ends.enter_async_context(aclosing(rows))
        assert (await anext(rows)).kind is WatchKind.SNAPSHOT_END
        pull_id = await _reported(puller, SECRET, endpoint)
        assert [rate.host for rate in await puller.list_rates()] == [socket.gethostname()]

        for name in ("team-a/x", "team-b", "team-a/secret-merger-7b"):
            asking = ours.resolve(name)
            kind = UnknownModelError if name.startswith("team-a/") else NotAllowedError
            await refused(kind, asking)
        for name in (SECRET, "team-b/other"):
            for asked in (ours.resolve(name), ours.list_sources(name), ours.list_bundles(name)):
                await refused(NotAllowedError, asked)
            await refused(NotAllowedError, anext(ours.watch(name)))
            await refused(NotAllowedError, anext(ours.watch(name, pulls=True)))
            await refused(NotAllowedError, ours.overview(name))
            await refused(NotAllowedError, ours.layout_version(ModelKey(name, "main", "x")))
        own_words = (SECRET, "team-b/other", "'team-b'", "team-a/secret-merger-7b")
        for word in own_words:
            said = [each.replace(word, "") for each in said]
        await refused(UnknownModelError, ours.fetch(record.ref.documents))
        assert not await ours.list_models() and not await ours.list_bundles()
        assert not await ours.list_sources() and await ours.overview() == ((), ())
        assert not await ours.list_rates() and not await ours.list_rates(["127.0.0.1"])

        # Ids of sources are no way either: what is not seen is not there.
        channel = dial(site.address, tls=site.files("source"))
        ends.push_async_callback(channel.close, None)
        remote = Remote(Role.COORDINATOR, site.address)
        stub = Stub(channel, pb.DESCRIPTOR.services_by_name["Coordinator"], remote)
        with pytest.raises(UnknownSourceError) as gone, translating(remote):
            await stub.Advertise(
                pb.AdvertiseRequest(source_id=source_id, source_secret=secret, generation=1)
            )
        said.append(str(gone.value))
        stolen = replace(record, model=record.model._replace(name="team-a/x"))
        await refused(NotAllowedError, ours.register(Registration(stolen, secret), made))
        await refused(NotAllowedError, _as(ours, source_id))
        for each in said:
            assert "team-b" not in each and "ns/b" not in each and "merger" not in each, each

        # A watch tells nothing of it, nor of its end.
        await theirs.deregister(source_id)
        await _reported(ours, "team-a/y", endpoint)
        async for told in rows:
            assert told.pull_id != pull_id and told.record is None
            if told.pull is not None:
                assert told.pull.model.name == "team-a/y"
                break
        assert (await anext(watch)).record is None  # the end of the list, which is empty


async def _as(client: CoordinatorClient, source_id: str) -> None:
    """Report a pull that has the id of a source."""
    async with client.reporting() as tell:
        await tell(_pull("team-a/x", 1, "127.0.0.1:1", source_id))
        await asyncio.sleep(1)
        await tell(_pull("team-a/x", 2, "127.0.0.1:1", source_id))


async def test_rates_are_of_pulls_that_the_coordinator_knows(site: Site) -> None:
    """Without a policy everything is shown, and a rate still needs a pull of a listed source."""
    await asyncio.to_thread(site.coordinator, "--lease-s", "300")
    source, reader = (
        CoordinatorClient(site.address, tls=site.files(name)) for name in ("source", "reader")
    )
    made, record, secret = registrable()
    name = record.model.name
    try:
        await source.register(Registration(record, secret), made)
        await _reported(reader, name, record.endpoint)
        assert await source.list_rates() == []  # it has not resolved it
        await reader.resolve(name)
        await _reported(reader, name, "10.1.2.3:7600")
        assert await source.list_rates() == []  # no source of it is there
        await _reported(reader, name, record.endpoint)
        (rate,) = await source.list_rates()
        # Of its own host, by the coordinator's word, and no faster than memory is.
        assert (rate.source_host, rate.host) == ("127.0.0.1", socket.gethostname())
        assert 0 < rate.gb_per_s <= 1000
    finally:
        await source.close()
        await reader.close()


async def test_a_source_names_no_model_that_its_caller_does_not_see(
    site: Site, checkpoint: Path
) -> None:
    others = OBSERVE.replace('"observe"', '["serve", "pull"]')
    site.policy.write_text(SERVE + PULL + others)
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy))
    _, endpoint = await asyncio.to_thread(site.serve, checkpoint, "--policy", str(site.policy))
    record = await listed(site, site.files("reader"))
    files = site.files("stranger")
    channel, who = dial(endpoint, tls=files), Remote(Role.SOURCE, endpoint, files)
    peer = Stub(channel, peer_pb2.DESCRIPTOR.services_by_name["Peer"], who)
    lease = Lease(channel, record, lambda: None, tls=files)
    try:
        with pytest.raises(PeerUntrustedError, match="may not pull that model") as opened:
            await lease.open(discovery.here(), ["tcp"], 10.0)
        _, another, _ = registrable()
        hello = peer_pb2.Hello(source_id=record.source_id, own=codec.source_to_wire(another))
        call = peer.Trade()
        refused = pytest.raises(PeerUntrustedError, match="may not pull that model")
        with refused as traded, translating(who):
            await call.write(peer_pb2.SwarmMessage(hello=hello))
            await call.read()
            await call
        cut(call)
        with translating(who):
            assert not (await peer.Describe(peer_pb2.DescribeRequest())).sources
        assert MODEL not in str(opened.value) + str(traded.value)
    finally:
        await lease.close()
        await channel.close(None)


#: What handlers may ask of the state and the board: to record events, and to wait for changes.
EVENTS = {
    "_state": {"event", "register", "tick", "follow", "now", "lease_s", "epoch", "store"},
    "_board": {"report", "end", "tick", "phases"},
}


def test_handlers_ask_the_registry_by_their_view_alone() -> None:
    for module in (service, listings, progress):
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                owner, asked = node.value.attr, node.attr
                assert asked in EVENTS.get(owner, {asked}), f"{module.__name__}: {owner}.{asked}"
            if isinstance(node, ast.Attribute) and node.attr in ("ask", "listed", "of_models"):
                pytest.fail(f"{module.__name__}:{node.lineno} asks the state")


def test_metrics_show_whom_a_policy_lets_observe_which_models(site: Site) -> None:
    site.policy.write_text(POLICY)
    metrics = f"127.0.0.1:{free_port()}"
    site.coordinator("--policy", str(site.policy), "--metrics", metrics, "--lease-s", "300")
    made, record, secret = registrable()
    record = replace(record, model=record.model._replace(name=SECRET))

    async def register() -> None:
        client = CoordinatorClient(site.address, tls=site.files("stranger"))
        try:
            await client.register(Registration(record, secret), made)
        finally:
            await client.close()

    asyncio.run(register())

    def fetched(name: str) -> str:
        files = site.files(name)
        context = ssl.create_default_context(cafile=files.authority)
        context.load_cert_chain(files.certificate, files.key)
        with urllib.request.urlopen(f"https://{metrics}/metrics", context=context) as answer:
            return str(answer.read().decode())

    assert f'mx_coordinator_sources{{model="{SECRET}"}} 1.0' in fetched("stranger")
    shown = fetched("source")
    assert 'mx_coordinator_sources{model="other"} 1.0' in shown and "team-b" not in shown
    with pytest.raises(urllib.error.HTTPError) as refused:  # it has no right at all
        fetched("engine")
    assert refused.value.code == 403
    assert b"may not observe any model" in refused.value.read()
    refused.value.close()
