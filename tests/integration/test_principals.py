"""Principals: what a policy allows is enforced at the coordinator, at sources and at data ports;
certificates and policies are replaced under what runs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from mx import discovery
from mx.core.types import Registration, SourceRecord
from mx.errors import (
    CoordinatorError,
    NotAllowedError,
    PeerRefusedError,
    PeerUntrustedError,
)
from mx.transport import Grant, TlsFiles
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.lease import GrantAnswer, Lease
from mx.wire.listing import WatchKind
from mx.wire.rpc import Stub
from mx.wire.status import Remote, Role, translating
from mx.wire.v1 import peer_pb2
from mx_transports.tcp import TcpTransport
from tests.support.certificates import Authority
from tests.support.commands import Command
from tests.support.policy_site import (
    MEMBERS,
    MODEL,
    OBSERVE,
    PULL,
    SERVE,
    Site,
    authority,
    flags,
    listed,
    registrable,
    site,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]

__all__ = ["authority", "site"]  # fixtures


def until_audited(command: Command, what: str, *fields: str) -> None:
    """Wait for an audit line, which is JSON also where other lines are not."""

    def audited() -> bool:
        lines = (line for line in command.err.splitlines() if f'"audit.{what}"' in line)
        found = [json.loads(line)["fields"] for line in lines if line.endswith("}")]
        texts = [" ".join(f"{key}={value}" for key, value in each.items()) for each in found]
        return any(all(field in text for field in fields) for text in texts)

    command.until(audited, f"audit line of what was {what}")


def test_the_coordinator_refuses_what_the_policy_does_not_allow(
    site: Site, checkpoint: Path
) -> None:
    coordinator = site.coordinator("--policy", str(site.policy))
    _, endpoint = site.serve(checkpoint)
    site.pulls("reader")
    until_audited(coordinator, "bound", "principal=spiffe://mx.test/ns/a/sa/source", "pin=")
    until_audited(coordinator, "read", "action=policy", "sha256=")
    said = site.refused("stranger", "pull", MODEL)
    assert f"spiffe://mx.test/ns/b/sa/other may not pull '{MODEL}'" in said
    until_audited(coordinator, "refused", "sa/other", "action=pull", f"model={MODEL}")
    said = site.refused("source", "serve", str(checkpoint), "--model", "other-1")
    assert "may not serve 'other-1'" in said

    async def asked(name: str, ask: Callable[[CoordinatorClient], Awaitable[Any]]) -> str:
        client = CoordinatorClient(site.address, tls=site.files(name))
        try:
            return str(await ask(client))
        except NotAllowedError as error:
            return error.message
        finally:
            await client.close()

    async def first(updates: AsyncGenerator[Any, None]) -> list[Any]:
        async with aclosing(updates):
            return [await anext(updates)]

    async def ask() -> None:
        models, pulls = CoordinatorClient.list_models, CoordinatorClient.overview
        assert MODEL in await asked("reader", models)
        assert await asked("stranger", models) == "[]"  # it may observe others
        assert endpoint in await asked("reader", lambda client: client.list_sources(MODEL))
        refused = f"spiffe://mx.test/ns/b/sa/other may not observe '{MODEL}'"
        for listing in (
            lambda client: client.list_sources(MODEL),
            lambda client: client.list_bundles(MODEL),
            lambda client: client.overview(MODEL),
            lambda client: first(client.watch(MODEL)),
            lambda client: first(client.watch(MODEL, pulls=True)),
        ):
            assert refused in await asked("stranger", listing)
        for ask in (pulls, lambda client: first(client.watch(pulls=True))):
            assert "may not observe any model" in await asked("reader", ask)
        assert "SNAPSHOT_END" in await asked("stranger", lambda client: first(client.watch()))
        assert endpoint in await asked("reader", lambda client: first(client.watch()))

    asyncio.run(ask())
    assert "has 2 URIs" in site.refused("several", "models")


def test_a_source_refuses_whom_its_policy_does_not_let_pull(site: Site, checkpoint: Path) -> None:
    coordinator = site.coordinator()  # it has none: what it says decides nothing at the source
    assert "every certificate of --tls-ca" in coordinator.err
    source, endpoint = site.serve(checkpoint, "--policy", str(site.policy))
    site.pulls("reader", "--from", f"peer={endpoint}", "--transport", "tcp")
    site.pulls("second")
    for more in ((), ("--from", f"peer={endpoint}")):
        said = site.refused("stranger", "pull", MODEL, *more)
        assert "spiffe://mx.test/ns/b/sa/other may not pull" in said
    until_audited(source, "refused", "sa/other", "action=pull")
    until_audited(source, "granted", "sa/reader", "action=pull", f"model={MODEL}", "revision=main")
    until_audited(coordinator, "granted", "sa/reader", "action=pull", f"model={MODEL}", "pin=")


def test_a_policy_needs_certificates_and_no_mistakes(site: Site, checkpoint: Path) -> None:
    command = site.run("--listen", site.address, "--policy", str(site.policy), daemon=True)
    assert command.wait(60) == 2 and "asks for none" in command.err
    site.policy.write_text("[[allow]]\nprincipal = 'a'\nmay = 'fly'\n")
    shown = flags(site.files("coordinator"))
    command = site.run("--listen", site.address, *shown, "--policy", str(site.policy), daemon=True)
    assert command.wait(60) == 2 and "line 1: there is no right 'fly'" in command.err
    said = site.refused(
        "source", "serve", str(checkpoint), "--policy", str(site.folder / "none"), code=2
    )
    assert "No such file" in said
    said = site.refused("reader", "pull", MODEL, "--hold")  # no coordinator has to answer for that
    assert "a server's certificate has a DNS name or an address, too" in said
    wrong = ("--policy", str(site.policy))
    said = site.refused("source", "pull", MODEL, "--hold", *wrong, code=2)
    assert "line 1: there is no right 'fly'" in said
    memory = ("--cache-socket", str(site.folder / "cache.sock"), "--memory", "1MB")
    said = site.refused("source", "serve", "--cache", *memory, *wrong, code=2)
    assert "line 1: there is no right 'fly'" in said


@asynccontextmanager
async def _granted(
    endpoint: str, tls: TlsFiles, record: SourceRecord
) -> AsyncIterator[GrantAnswer]:
    channel = dial(endpoint, tls=tls)
    lease = Lease(channel, record, lambda: None, tls=tls)
    try:
        yield await lease.open(discovery.here(), ["tcp"], 10.0)
    finally:
        await lease.close()
        await channel.close(None)


@asynccontextmanager
async def _describing(
    endpoint: str, tls: TlsFiles
) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    channel, who = dial(endpoint, tls=tls), Remote(Role.SOURCE, endpoint, tls)
    stub = Stub(channel, peer_pb2.DESCRIPTOR.services_by_name["Peer"], who)

    async def describe() -> object:
        with translating(who):
            return await stub.Describe(peer_pb2.DescribeRequest())

    try:
        yield describe
    finally:
        await channel.close(None)


async def test_a_grant_can_be_read_by_the_certificate_that_opened_it_alone(
    site: Site, checkpoint: Path
) -> None:
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy))
    _, endpoint = await asyncio.to_thread(site.serve, checkpoint, "--policy", str(site.policy))
    reader, second = site.files("reader"), site.files("second")
    record = await listed(site, reader)
    async with _granted(endpoint, reader, record) as granted:
        grant = Grant(
            granted.grant_id,
            granted.tickets["tcp"],
            granted.generation,
            granted.region_nbytes,
            endpoint,
            tls=reader,
        )
        with pytest.raises(PeerRefusedError, match="another certificate"):  # which may pull it, too
            await asyncio.to_thread(TcpTransport().open, replace(grant, tls=second))
        session = await asyncio.to_thread(TcpTransport().open, grant)
        session.close()
        assert await asyncio.to_thread(session.join, 10.0)
    with pytest.raises(PeerUntrustedError, match="may not pull"):
        async with _granted(endpoint, site.files("stranger"), record):
            pass


async def test_a_refusal_that_comes_before_the_request_is_written_is_told(
    site: Site, checkpoint: Path
) -> None:
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy))
    _, endpoint = await asyncio.to_thread(site.serve, checkpoint, "--policy", str(site.policy))
    record, stranger = await listed(site, site.files("reader")), site.files("stranger")
    channel = dial(endpoint, tls=stranger)
    lease = Lease(channel, record, lambda: None, tls=stranger)
    assert lease._stub is not None
    make, calls = lease._stub.Open, list[Any]()

    async def fails(_: object) -> None:  # as grpc.aio does then
        code, none = grpc.StatusCode.INTERNAL, grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(code, none, none, "Internal error from Core", "")

    def called() -> Any:
        calls.append(make())
        if len(calls) == 1:
            calls[0].write = fails
        return calls[-1]

    vars(lease._stub)["Open"] = called
    try:
        with pytest.raises(PeerUntrustedError, match="may not pull"):
            await lease.open(discovery.here(), ["tcp"], 10.0)
        assert len(calls) == 2
    finally:
        for call in calls:
            call.cancel()
        await lease.close()
        await channel.close(None)


async def test_a_source_is_at_hosts_that_its_certificate_names_and_its_registrants(
    site: Site,
) -> None:
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy))
    client = CoordinatorClient(site.address, tls=site.files("source"))
    other = CoordinatorClient(site.address, tls=site.files("engine"))
    documents, record, secret = registrable()
    try:
        for wrong in (
            replace(record, endpoint="127.0.0.2:7601"),
            replace(record, place=replace(record.place, addresses=("127.0.0.1", "10.0.0.9"))),
        ):
            with pytest.raises(NotAllowedError, match=r"does not name (127.0.0.2|10.0.0.9)"):
                await client.register(Registration(wrong, secret), documents)
        await client.register(Registration(record, secret), documents)
        # With its secret, and the right to serve the model, but another certificate.
        with pytest.raises(NotAllowedError, match="was registered by"):
            await other.register(Registration(record, secret), documents)
        other._secrets[record.source_id] = secret
        with pytest.raises(NotAllowedError, match="was registered by"):
            await other.advertise(record.source_id, record.generation, record.table.held)
        with pytest.raises(NotAllowedError, match="was registered by"):
            await other.deregister(record.source_id)
        await client.advertise(record.source_id, record.generation, record.table.held)
        await client.deregister(record.source_id)
    finally:
        await client.close()
        await other.close()


async def test_a_client_shows_what_its_files_are_now_and_its_streams_go_on(
    site: Site, tmp_path: Path
) -> None:
    await asyncio.to_thread(site.coordinator)
    used = TlsFiles(*(str(tmp_path / f"used.{kind}") for kind in ("c", "k", "a")))
    source, engine = site.files("source"), site.files("engine")
    _put(used, source, source.authority)
    client = CoordinatorClient(site.address, tls=used)
    documents, record, secret = registrable()
    try:
        await client.register(Registration(record, secret), documents)
        async with aclosing(client.watch(MODEL)) as updates:
            up = await anext(updates)
            assert up.record is not None and up.record.source_id == record.source_id
            _put(used, engine, engine.authority)
            with pytest.raises(NotAllowedError, match="was registered by .*sa/source, .*sa/engine"):
                await client.deregister(record.source_id)
            Path(used.key).write_text("half a file")  # what was read last is used further
            with pytest.raises(NotAllowedError, match="was registered by"):
                await client.deregister(record.source_id)
            _put(used, source, source.authority)
            await client.deregister(record.source_id)
            while (await anext(updates)).kind is not WatchKind.GONE:
                pass
    finally:
        await client.close()


def _until(found: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def _slow(site: Site, name: str, out: Path) -> Command:
    """A pull that runs for some seconds, once bytes have arrived."""
    found = site.mx(name, "pull", MODEL, "--transport", "tcp", "--out", str(out))
    return found


@pytest.mark.long
def test_a_new_policy_ends_what_it_does_not_allow(site: Site, checkpoint: Path) -> None:
    coordinator = site.coordinator("--policy", str(site.policy), "--lease-s", "1")
    policy = site.folder / "of-source.toml"
    policy.write_text(SERVE + PULL)
    source, endpoint = site.serve(checkpoint, "--policy", str(policy), "--max-bandwidth", "3MB")
    pull = _slow(site, "reader", site.folder / "pulled")
    source.until(lambda: "reader.granted" in source.err, "a reader")

    policy.write_text("oh [")
    source.until(lambda: "policy.bad" in source.err, "a word about the bad policy")
    assert "the policy of before holds" in source.err and pull.process.poll() is None
    policy.write_text(SERVE)
    assert pull.wait(60) == 5, pull.err
    assert "may not pull" in pull.err and "stopped after" in pull.err
    assert not (site.folder / "pulled" / "model.safetensors").exists()
    until_audited(source, "refused", "sa/reader", "action=pull")

    site.policy.write_text(PULL + OBSERVE)
    coordinator.until(lambda: "may not serve" in coordinator.err, "the end of the listing")
    _until(
        lambda: endpoint not in _ended(site.mx("reader", "sources", "--json")).out,
        "the source is listed",
    )
    site.policy.write_text(SERVE + PULL + OBSERVE)
    _until(
        lambda: endpoint in _ended(site.mx("reader", "sources", "--json")).out,
        "the source is not listed again",
    )


def _replaced(command: Command, count: int) -> bool:
    return command.err.count("certificates.replaced") >= count


def _ended(command: Command) -> Command:
    command.wait(60)
    return command


def _put(files: TlsFiles, by: TlsFiles, *authorities: str) -> None:
    """Replace files as a user would, one after the other."""
    for one, contents in (
        (files.authority, "".join(Path(each).read_text() for each in authorities)),
        (files.certificate, Path(by.certificate).read_text()),
        (files.key, Path(by.key).read_text()),
    ):
        new = Path(one + ".new")
        new.write_text(contents)
        new.rename(one)


@pytest.mark.long
def test_certificates_are_replaced_under_a_pull_and_heartbeats(
    site: Site, checkpoint: Path, tmp_path: Path
) -> None:
    later = Authority(tmp_path, "later")
    before, after = site.files("source").authority, str(tmp_path / "later.pem")
    used: dict[str, TlsFiles] = {}
    for name in ("coordinator", "source", "reader"):
        used[name] = TlsFiles(*(str(tmp_path / f"{name}.{kind}.used") for kind in ("c", "k", "a")))
        _put(used[name], site.files(name), before)
    site.files = lambda name: used[name]  # type: ignore[method-assign]
    coordinator = site.coordinator("--lease-s", "1")
    source, endpoint = site.serve(checkpoint, "--max-bandwidth", "3MB")
    pull = _slow(site, "reader", tmp_path / "pulled")
    source.until(lambda: "reader.granted" in source.err, "a reader")

    # First all trust both authorities, then show the new certificates, then trust the new alone.
    for shown, trusted in (
        (site.authority, (before, after)),
        (later, (before, after)),
        (later, (after,)),
    ):
        counts = [each.err.count("certificates.replaced") for each in (coordinator, source)]
        for name, files in used.items():
            _put(files, shown.certificate(name, MEMBERS[name]), *trusted)
        for each, count in zip((coordinator, source), counts, strict=True):
            _until(partial(_replaced, each, count + 1), "no new certificate")
    assert pull.process.poll() is None, pull.err
    assert pull.wait(60) == 0, pull.err
    assert not re.search("source.gone|lease expired", coordinator.err)
    site.pulls("reader")  # with the new certificates
    old = site.authority.certificate("reader", MEMBERS["reader"])
    _put(used["reader"], old, before)
    command = site.mx("reader", "models")
    assert command.wait(60) == 5, command.err  # the server's, and its own, are of another authority

    # The coordinator ends, and comes back: the source reaches it with what it has now.
    coordinator.end()
    coordinator = site.coordinator("--lease-s", "1")
    coordinator.until(lambda: "source.registered" in coordinator.err, "the source again")
    assert endpoint in coordinator.err


async def test_an_authority_that_is_gone_lets_its_members_go_on_nowhere(
    site: Site, checkpoint: Path, tmp_path: Path
) -> None:
    """Also on connections that were there before; who has a new certificate goes on."""
    later = Authority(tmp_path, "later")
    both = (site.files("source").authority, str(tmp_path / "later.pem"))
    used: dict[str, TlsFiles] = {}
    for name, by in (("coordinator", later), ("source", later), ("reader", site.authority)):
        used[name] = TlsFiles(*(str(tmp_path / f"{name}.{kind}.used") for kind in ("c", "k", "a")))
        _put(used[name], by.certificate(name, MEMBERS[name]), *both)
    site.files = lambda name: used[name]  # type: ignore[method-assign]
    coordinator = await asyncio.to_thread(site.coordinator)
    source, endpoint = await asyncio.to_thread(site.serve, checkpoint)
    reader = CoordinatorClient(site.address, tls=used["reader"])
    try:
        record = await listed(site, used["reader"])
        async with (
            _granted(endpoint, used["reader"], record),
            _describing(endpoint, used["reader"]) as describe,
            aclosing(reader.watch(MODEL)) as updates,
        ):
            await anext(updates)
            await describe()
            for each, name in ((coordinator, "coordinator"), (source, "source")):
                _put(used[name], used[name], both[1])
                await asyncio.to_thread(each.until, partial(_replaced, each, 1), "the new file")
            with pytest.raises(NotAllowedError, match="the authority of your certificate any more"):
                await reader.list_models()
            with pytest.raises(CoordinatorError):  # and not NotAllowedError: it may begin again
                async for _ in updates:
                    pass
            with pytest.raises(PeerUntrustedError, match="of your certificate any more"):
                await describe()
            _put(used["reader"], later.certificate("reader", MEMBERS["reader"]), *both)
            assert len((await reader.resolve(MODEL)).sources) == 1
            await describe()
    finally:
        await reader.close()


def test_requests_are_taken_by_whom_the_policy_lets(site: Site) -> None:
    coordinator = site.coordinator("--policy", str(site.policy))
    assert "policy.read" in coordinator.err

    async def listed_port() -> int:
        client = CoordinatorClient(site.address, tls=site.files("engine"))
        documents, record, secret = registrable()
        record = replace(record, requests_port=8000)
        try:
            await client.register(Registration(record, secret), documents)
            (status,) = await client.list_sources(MODEL)
            await client.deregister(record.source_id)
            return status.record.requests_port
        finally:
            await client.close()

    assert asyncio.run(listed_port()) == 0
    until_audited(coordinator, "refused", "sa/engine", "action=take-requests")
    allowed = SERVE.replace('"serve"', '["serve", "take-requests"]')
    count = coordinator.err.count("policy.read")
    site.policy.write_text(allowed + PULL)
    coordinator.until(lambda: coordinator.err.count("policy.read") > count, "the new policy")
    assert asyncio.run(listed_port()) == 8000
