"""What a few principals hold of a coordinator or a source leaves room for others, and costs it
little: real processes, certificates, and their memory as the kernel counts it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mx.core.budget import BudgetShares, Limits
from mx.errors import CoordinatorError, MxError
from mx.transport import TlsFiles
from mx.wire import documents as wire_documents
from mx.wire.client import CoordinatorClient
from tests.support.certificates import Authority
from tests.support.clients import client_of
from tests.support.commands import Run, environment, serve, start_coordinator
from tests.support.daemon import ROOT
from tests.support.outcomes import until
from tests.support.policy_site import HERE, Site, authority, site
from tests.support.records import by_digest, make_documents, make_record, register_at

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]
__all__ = ["authority", "site"]

MIB = 1 << 20
#: What the attacks may cost: of one principal, and of twenty.
ONE, TWENTY = 64 * MIB, 256 * MIB
#: As large as a server takes, and larger.
SIZES = (65_000, 4 * MIB)
#: As many calls as a server allows a connection at a time.
STREAMS = 100
REGISTER, OPEN = "/mx.wire.v1.Coordinator/Register", "/mx.wire.v1.Peer/Open"
SECRET = b"s" * 32


def memory(pid: int, what: str) -> int:
    """Return the resident memory of a process ("VmRSS"), or its peak ("VmHWM"), in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(line)


@contextmanager
def half_sent(
    address: str,
    *,
    nbytes: int,
    path: str = REGISTER,
    files: TlsFiles | None = None,
    connections: int = 1,
    again: bool = False,
) -> Iterator[Callable[[], int]]:
    """Run a client that begins 250 messages on each connection and withholds the last byte of each.
    Gives what returns how many calls it has made."""
    shown = ("--tls", files.certificate, files.key, files.authority) if files else ()
    command = [
        *(sys.executable, "-m", "tests.support.half_sent", address, "--seconds=60"),
        *(f"--connections={connections}", *(("--again",) if again else ())),
        *(f"--nbytes={nbytes}", f"--path={path}", *shown),
    ]
    env = environment()
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        made = 0

        def calls() -> int:
            nonlocal made
            assert child.stdout is not None
            words = child.stdout.readline().split()
            gone, there = int(words[-1]), int(words[3])
            made = max(made, there + STREAMS * gone)
            return made

        try:
            yield calls
        finally:
            child.kill()


async def cost_of(
    pid: int,
    attacks: Sequence[contextlib.AbstractContextManager[Callable[[], int]]],
    honest: Callable[[], Awaitable[object]],
) -> int:
    """Return by how much a process's memory grows at most while clients attack it, and honest
    calls are answered."""
    await honest()  # what that needs is there
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak is what it has now
    before = memory(pid, "VmRSS")
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(each) for each in attacks]
        for _ in range(6):  # three seconds
            for calls in running:
                await asyncio.to_thread(calls)
            await honest()
        assert all(calls() >= STREAMS for calls in running)
    return memory(pid, "VmHWM") - before


@pytest.mark.parametrize("nbytes", SIZES)
async def test_half_sent_requests_cost_a_coordinator_little(run: Run, nbytes: int) -> None:
    address, command = start_coordinator(run)
    async with client_of(address, timeout_s=60.0) as client:
        attacks = [half_sent(address, nbytes=nbytes)]
        cost = await cost_of(command.process.pid, attacks, client.list_models)
    assert cost <= ONE, f"{cost >> 20} MiB"


@pytest.mark.parametrize("nbytes", SIZES)
async def test_half_sent_requests_cost_a_source_little(
    run: Run, coordinator: str, checkpoint: Path, nbytes: int
) -> None:
    command = serve(run, checkpoint, "m", coordinator)
    endpoint = str(command.json()["endpoint"])

    async def honest() -> None:
        pulled = run("pull", "m", "--from", f"peer={endpoint}", "--transport", "tcp")
        assert await asyncio.to_thread(pulled.wait, 60) == 0, pulled.err

    attacks = [half_sent(endpoint, nbytes=nbytes, path=OPEN)]
    cost = await cost_of(command.process.pid, attacks, honest)
    assert cost <= ONE, f"{cost >> 20} MiB"


@pytest.mark.parametrize("right", ["", "serve"])
async def test_half_sent_requests_with_a_certificate_cost_a_coordinator_little(
    site: Site, right: str
) -> None:
    name = "source" if right else "holder"
    site.policy.write_text(site.policy.read_text().replace("/ns/*/sa/reader", "/ns/a/sa/reader"))
    command = site.coordinator("--policy", str(site.policy))
    reader = site.files("reader")
    async with client_of(site.address, tls=reader, timeout_s=60.0) as client:
        attacks = [
            half_sent(site.address, nbytes=nbytes, files=site.files(name)) for nbytes in SIZES
        ]
        cost = await cost_of(command.process.pid, attacks, client.list_models)
    assert cost <= ONE, f"{cost >> 20} MiB"
    if not right:
        until(lambda: "connections.faulty" in command.err, "its connection has ended")
        assert "may do nothing here" in command.err


@pytest.mark.parametrize("nbytes", SIZES)
async def test_half_sent_requests_on_twenty_connections_of_one_principal_cost_little(
    site: Site, authority: Authority, nbytes: int
) -> None:
    (files,) = tenants(site, authority, 1)
    command = site.coordinator("--policy", str(site.policy))
    async with client_of(site.address, tls=site.files("reader"), timeout_s=60.0) as client:
        attacks = [half_sent(site.address, nbytes=nbytes, files=files, connections=20)]
        cost = await cost_of(command.process.pid, attacks, client.list_models)
    assert cost <= ONE, f"{cost >> 20} MiB"


def tenants(site: Site, authority: Authority, count: int) -> list[TlsFiles]:
    """Return certificates of tenants, each of which may serve the models of a name of its own."""
    with site.policy.open("a") as policy:
        for number in range(count):
            policy.write(
                f'[[allow]]\nprincipal = "spiffe://mx.test/tenant-{number}"\nmay = "serve"\n'
                f'models = "team-{number}/*"\n'
            )
    return [
        authority.certificate(f"tenant-{n}", f"{HERE},URI:spiffe://mx.test/tenant-{n}")
        for n in range(count)
    ]


@pytest.mark.parametrize("nbytes", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.long)])
async def test_half_sent_requests_of_twenty_principals_cost_a_coordinator_little(
    site: Site, authority: Authority, nbytes: int
) -> None:
    files = tenants(site, authority, 20)
    command = site.coordinator("--policy", str(site.policy))
    async with client_of(site.address, tls=site.files("reader"), timeout_s=60.0) as client:
        attacks = [half_sent(site.address, nbytes=nbytes, files=each) for each in files]
        cost = await cost_of(command.process.pid, attacks, client.list_models)
    assert cost <= TWENTY, f"{cost >> 20} MiB"


async def taken(client: CoordinatorClient, tenant: int, most: int) -> tuple[int, str]:
    """Register models of a tenant until that is refused. Return how many, and why."""
    for number in range(most):
        documents = make_documents("weights")
        record = replace(make_record(documents, name=f"team-{tenant}/{number}"))
        place = replace(record.place, addresses=("127.0.0.1",))
        record = replace(record, endpoint="127.0.0.1:7601", place=place)
        try:
            await register_at(client, record, by_digest(documents), source_secret=SECRET)
        except CoordinatorError as error:
            return number, error.message
    return most, ""


async def test_a_fifth_tenant_registers_while_four_take_all_names(
    site: Site, authority: Authority
) -> None:
    limits = Limits.of(64 * MIB)
    shares = BudgetShares(limits.models)
    files = tenants(site, authority, 5)
    site.coordinator("--policy", str(site.policy), "--control-memory", "64MiB")
    found = []
    for number, each in enumerate(files):
        async with client_of(site.address, tls=each, timeout_s=60.0) as client:
            most = shares.reserved if number == 4 else limits.models
            found.append(await taken(client, number, most))
    counts = [count for count, _ in found]
    assert counts == [shares.most, shares.most, *[shares.reserved] * 3]
    assert "its limit for one principal" in found[0][1] and found[3][1].endswith("its limit")
    assert found[4] == (shares.reserved, "")


@pytest.mark.parametrize(
    ("setting", "pieces", "taken"),
    [((), 64, True), ((), 1024, False), (("--max-request", "1100kB"), 1024, True)],
    ids=["pieces", "pages", "pages by setting"],
)
async def test_pages_of_the_release_before_are_taken_where_a_setting_allows_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, ...], pieces: int, taken: bool
) -> None:
    documents = make_documents("large", nbytes=1_500_000)
    monkeypatch.setattr(wire_documents, "PIECE_BYTES", pieces << 10)
    address, _ = start_coordinator(run, *setting)
    # gRPC's status; or, where its reset of the stream comes first, only that the call was ended.
    refused = pytest.raises(MxError, match=r"larger than max|stopped meanwhile")
    async with client_of(address, timeout_s=60.0) as client:
        with contextlib.nullcontext() if taken else refused:
            record = make_record(documents)
            await register_at(client, record, by_digest(documents), source_secret=SECRET)
        assert len(await client.list_sources()) == taken
