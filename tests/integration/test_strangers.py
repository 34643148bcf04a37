"""Strangers on other addresses take what there is: honest clients get on with their work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from safetensors.numpy import save_file

from mx import api, codec
from mx.core.digest import document_digest
from mx.core.types import ManifestRef, SourceRecord
from mx.core.versions import headers
from mx.errors import MxError
from mx.units import MIB
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.documents import PIECE_BYTES, pages
from mx.wire.v1 import coordinator_pb2 as pb
from mx.wire.v1 import peer_pb2
from tests.support.clients import client_of
from tests.support.daemon import ROOT, daemon, ended, mx, python
from tests.support.records import by_digest, make_documents, make_record, register_at, registration
from tests.support.strangers import seen_from

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(180)]

SECRET = b"s" * 32
SERVICE = "/mx.wire.v1.Coordinator/"
STRANGER = "127.0.0.2"
LOAD = ROOT / "benchmarks" / "crowd_load.py"

#: A coordinator with room for 16 MiB of documents.
_SMALL = """
import asyncio, signal, sys
from mx.coordinator.daemon import Coordinator
from mx.coordinator.state import CoordinatorState
from mx.core.budget import Limits

async def main():
    coordinator = Coordinator(state=CoordinatorState(limits=Limits(documents_nbytes=16 << 20)))
    print(await coordinator.start("127.0.0.1:0"), file=sys.stderr, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def small_coordinator() -> Iterator[str]:
    with ended(python(_SMALL)) as process:
        assert process.stderr is not None
        yield process.stderr.readline().strip()


async def register(client: CoordinatorClient, documents: list[bytes], name: str) -> str:
    """Return "listed", or the name of the error."""
    record = make_record(documents, name=name)
    try:
        await register_at(client, record, by_digest(documents), source_secret=SECRET)
    except MxError as error:
        return f"{type(error).__name__}: {error.message}"
    return "listed"


async def honest_work(address: str, checkpoint: Path) -> None:
    """Serve a checkpoint from this machine's usual address, and pull it."""

    def serve_and_pull() -> None:
        with (
            api.serve(checkpoint, model="honest", coordinator=address),
            api.pull("honest", coordinator=address) as pull,
        ):
            pull.wait(60)

    try:
        await asyncio.to_thread(serve_and_pull)
        happened = "pulled"
    except MxError as error:
        happened = f"{type(error).__name__}: {error.message}"
    assert happened == "pulled"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose manifest has some ten thousand bytes."""
    tensors = {f"model.layers.{n}.weight": np.full(8, n, np.float32) for n in range(300)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


#: What a stranger asks for in turn, so that smaller gaps are taken, too.
SIZES_BYTES = (2 * MIB, 256 << 10, 32 << 10, 4 << 10, 64)


async def test_documents_from_one_address_leave_room_for_others(checkpoint: Path) -> None:
    refused: list[str] = []
    with small_coordinator() as address, seen_from(STRANGER, address) as there:
        async with client_of(there, timeout_s=60.0) as stranger:
            for nbytes in SIZES_BYTES:
                for number in range(20):
                    label = f"{nbytes}.{number}"
                    documents = make_documents(label, files=label, nbytes=nbytes)
                    answer = await register(stranger, documents, label)
                    if answer != "listed":
                        refused.append(answer)
                        break
        await honest_work(address, checkpoint)
    assert refused and all(STRANGER in answer for answer in refused), refused


async def test_uploads_that_do_not_end_leave_room_for_others(checkpoint: Path) -> None:
    """Each of the streams sends most of three documents, and nothing more."""
    with small_coordinator() as address, seen_from(STRANGER, address) as there:
        channel: Any = dial(there)
        streams: list[Any] = []
        try:
            async with client_of(address, timeout_s=60.0) as client:
                for nbytes in SIZES_BYTES:
                    for number in range(20):
                        streams.append(await half_register(channel, f"{nbytes}.{number}", nbytes))
                        await client.list_models()  # meanwhile the pages are received
                        await asyncio.sleep(0.05)
                        if streams[-1].done():  # refused: what it has sent is let go
                            break
            await honest_work(address, checkpoint)
        finally:
            for stream in streams:
                stream.cancel()
            await channel.close(None)


async def half_register(channel: Any, label: str, nbytes: int) -> Any:
    documents = make_documents(label, nbytes=nbytes)
    source = codec.registration_to_wire(registration(make_record(documents, name=label), SECRET))
    stream = channel.stream_unary(SERVICE + "Register")(metadata=headers())
    await stream.write(pb.RegisterRequest(source=source).SerializeToString())
    for each in documents[:2]:
        for page in pages(document_digest(each), each, PIECE_BYTES):
            if not stream.done():
                with contextlib.suppress(grpc.aio.AioRpcError):  # it is refused just now
                    await stream.write(pb.RegisterRequest(page=page).SerializeToString())
    return stream


def junk(number: int) -> tuple[SourceRecord, list[bytes]]:
    documents = [f"{kind} {number}".encode().ljust(MIB, b".") for kind in ("a", "b", "c")]
    digests = [document_digest(each) for each in documents]
    ref = ManifestRef(digests[0], digests[1], digests[2], (MIB, MIB, MIB))
    record = make_record(make_documents("A"), name=f"junk{number}")
    return replace(
        record, ref=ref, table=replace(record.table, layout_digest=ref.layout)
    ), documents


async def test_what_can_not_be_decoded_is_refused_and_not_held() -> None:
    with small_coordinator() as address:
        async with client_of(address, timeout_s=60.0) as client:
            for number in range(8):  # each would take a fifth of the room
                record, documents = junk(number)
                try:
                    await register_at(client, record, by_digest(documents), source_secret=SECRET)
                    answer = "listed"
                except MxError as error:
                    answer = f"{type(error).__name__}: {error.message}"
                assert answer.startswith("ManifestError") and "decoded" in answer
                digests = [digest for digest, _ in record.ref.documents]
                missing = await client.link.stub.Missing(pb.MissingRequest(digests=digests))
                assert set(missing.digests) == set(digests)
            assert await client.list_models() == []
            documents = make_documents("A")
            assert await register(client, documents, "llama") == "listed"
            # Documents of two manifests do not make a third.
            others = make_documents("B", nbytes=MIB)
            assert await register(client, others, "other") == "listed"
            mixed = [documents[0], *others[1:]]
            assert (await register(client, mixed, "mixed")).startswith("ManifestError")


# -- connections -------------------------------------------------------------------------------

#: A daemon that is started with few descriptors, and what ends connections without a call soon.
_FEW = """
import importlib.util, resource, sys
import mx.wire.server
from mx.coordinator.daemon import CoordinatorOptions, run
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
mx.wire.server.IDLE_S = float(sys.argv[3])
if importlib.util.find_spec("mx.wire.calls"):
    importlib.import_module("mx.wire.calls").UNREAD_S = 2.0
sys.exit(run(CoordinatorOptions(listen="127.0.0.1:0")))
"""
_SERVE = """
import resource, sys
import mx.wire.server
from mx.cli import main
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
mx.wire.server.IDLE_S = float(sys.argv[3])
sys.argv = ["mx", *sys.argv[4:]]
sys.exit(main())
"""


#: A daemon whose program opens files of its own, once it listens.
_OTHERS = """
import os, resource, sys
from mx.coordinator.daemon import CoordinatorOptions, run
soft, own = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
files = []

def say(address):
    while len(os.listdir("/proc/self/fd")) < own:
        files.append(os.open(os.devnull, os.O_RDONLY))
    print(address, file=sys.stderr, flush=True)

sys.exit(run(CoordinatorOptions(listen="127.0.0.1:0"), say))
"""
#: A program that embeds a source, and has files of its own.
_EMBEDS = """
import os, resource, signal, sys
import mx
soft, own = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
checkpoint, coordinator = sys.argv[3:]
with mx.serve(checkpoint, model="honest", coordinator=coordinator, max_bandwidth=8_000_000):
    files = []
    while len(os.listdir("/proc/self/fd")) < own:
        files.append(os.open(os.devnull, os.O_RDONLY))
    print("serves", file=sys.stderr, flush=True)
    signal.pause()
"""


class Crowd:
    """The load generator of the benchmark, as a child: it holds connections."""

    def __init__(self, address: str, connections: int, *more: str, hosts: int = 8) -> None:
        command = [sys.executable, str(LOAD), address, *more]
        command += ["--connections", str(connections), "--hosts", str(hosts)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self._read()

    def _read(self) -> dict[str, int]:
        assert self._process.stdout is not None
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found

    def found(self) -> dict[str, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


async def answers(address: str) -> str:
    """Register and resolve over a new connection, and say what happened."""
    async with client_of(address, timeout_s=60.0) as client:
        happened = await register(client, make_documents("A"), "llama")
        if happened == "listed":
            found = await client.resolve("llama")
            happened = f"{len(found.sources)} found"
    return happened


async def at_most(crowd: Crowd, count: float) -> bool:
    """Return True once no more connections than this are open; False after long."""
    for _ in range(600):
        if crowd.found()["open"] <= count:
            return True
        await asyncio.sleep(0.1)
    return False


HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


async def test_idle_connections_stop_no_coordinator() -> None:
    """They answer the server's pings. The soft limit is what a shell gives."""
    with ended(python(_FEW, "1024", str(HARD), "6")) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        with Crowd(address, 1100) as crowd:
            async with client_of(address, timeout_s=60.0) as kept:
                assert await answers(address) == "1 found"
                assert await kept.list_models()
                assert await at_most(crowd, 0)
                # An honest client has been idle as well, and connects again.
                assert await kept.list_models()


async def test_idle_connections_stop_no_source(checkpoint: Path) -> None:
    serve = ("serve", str(checkpoint), "--model", "honest", "--listen", "127.0.0.1:0", "--json")
    with daemon() as (_, coordinator):
        command = [sys.executable, "-c", _SERVE, "1024", str(HARD), "6", *serve]
        process = subprocess.Popen(
            [*command, "--coordinator", coordinator],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}"},
        )
        try:
            assert process.stdout is not None
            endpoint = json.loads(process.stdout.readline())["endpoint"]
            with Crowd(endpoint, 1100) as crowd:
                ran = await asyncio.to_thread(mx, "pull", "honest", "--coordinator", coordinator)
                assert ran.returncode == 0, ran
                assert await at_most(crowd, 0)
        finally:
            process.kill()
            process.communicate()


async def test_one_address_does_not_take_all_connections() -> None:
    """Few descriptors for good, and connections that are not ended for being idle."""
    with ended(python(_FEW, "256", "256", "600")) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        with seen_from("127.0.0.9", address) as there:
            async with client_of(
                there, timeout_s=60.0
            ) as before:  # is idle, and one of few from there
                assert await before.list_models() == []
                with Crowd(address, 400, hosts=1) as crowd:
                    assert await at_most(crowd, 0.75 * 256)
                    assert await answers(address) == "1 found"
                    assert len(await before.list_models()) == 1
        process.terminate()
        said = process.stderr.read()
    assert said.count("connections.crowded") == 1 and "mostly_from=127.0.1.1" in said, said
    assert "ulimit -n" in said


async def test_a_crowd_that_takes_every_descriptor_at_once_loses_them() -> None:
    """The coordinator's process has files of its own, and none is left beside the crowd."""
    with ended(python(_OTHERS, "256", "90")) as process:
        assert process.stderr is not None
        address = process.stderr.readline().strip()
        process.send_signal(signal.SIGSTOP)  # so that all are there before it can look
        with Crowd(address, 400, "--every", "1", hosts=1) as crowd:
            process.send_signal(signal.SIGCONT)
            assert await at_most(crowd, 256 - 90)
            assert await answers(address) == "1 found"


async def test_the_files_of_a_program_are_no_crowd(tmp_path: Path) -> None:
    """Seventy descriptors are left to a source, of which honest readers take a few."""
    save_file({"w": np.ones(4 * MIB, np.float32)}, tmp_path / "model.safetensors")
    with daemon() as (_, coordinator):
        child = python(_EMBEDS, "1024", "954", str(tmp_path), coordinator)
        with ended(child) as process:
            assert process.stderr is not None
            while process.stderr.readline() != "serves\n":
                assert process.poll() is None
            command = ("pull", "honest", "--coordinator", coordinator, "--transport", "tcp")
            ran = await asyncio.to_thread(mx, *command)
            assert ran.returncode == 0, ran


async def test_connections_that_take_no_answer_are_ended() -> None:
    """They have a running call, and answer pings."""
    with ended(python(_FEW, "1024", str(HARD), "600")) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        with (
            Crowd(address, 20, "--every", "1", "--unread") as crowd,
            Crowd(address, 20, "--every", "1") as others,
        ):
            assert await at_most(crowd, 0)
            assert others.found()["open"] == 20


# -- plain text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "by_setting", "count"),
    [("0.0.0.0:0", False, 1), ("0.0.0.0:0", True, 1), ("127.0.0.1:0", False, 0)],
)
def test_insecure_says_what_it_means(listen: str, by_setting: bool, count: int) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}"}
    if by_setting:
        environment["MX_PEER_INSECURE"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "mx.cli.coordinator", "--listen", listen]
        + ([] if by_setting else ["--insecure"]),
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = ""
        while "listens on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
    finally:
        process.kill()
        said += process.communicate()[1]
    lines = [line for line in said.splitlines() if "in the clear" in line]
    assert len(lines) == count, said
    assert all("weights" in line and "--tls-cert" in line for line in lines)


# -- the log ------------------------------------------------------------------------------------


async def test_refusals_of_one_address_are_one_line_in_a_while() -> None:
    """Each of these calls is refused. What is left out of the log is counted there later."""
    command = [sys.executable, "-m", "mx.cli.coordinator", "--listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        address = ""
        while not address:
            line = (await process.stderr.readline()).decode()
            address = line.split("listens on ")[1].split(";")[0] if "listens on" in line else ""
        channel: Any = dial(address)
        missing = channel.unary_unary(SERVICE + "Missing")
        request = pb.MissingRequest(digests=[b"short"]).SerializeToString()
        for _ in range(300):
            with pytest.raises(grpc.aio.AioRpcError):
                await missing(request, metadata=headers())
            await asyncio.sleep(0.01)
        await channel.close(None)
        lines, told = 0, 0
        while told < 300:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert "request.refused" in line and "error=PeerProtocolError" in line
            assert "127.0.0.1" in line
            lines += 1
            count = int(line.split("held_back=")[1].split()[0]) if "held_back=" in line else 0
            told += count + ("text=" in line)
            assert lines < 20, line
        assert told == 300
    finally:
        process.kill()
        await process.wait()


async def test_what_peers_send_wrongly_is_one_line_in_a_while(checkpoint: Path) -> None:
    """A stranger opens streams to a source, each as another peer, and sends nonsense."""
    with daemon() as (_, coordinator):
        serve = ("serve", str(checkpoint), "--model", "honest", "--coordinator", coordinator)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mx", *serve),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}"},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            while b"stop with Ctrl-C" not in await process.stderr.readline():
                pass
            async with client_of(coordinator, timeout_s=60.0) as client:
                (source,) = (await client.resolve("honest")).sources
            channel: Any = dial(source.endpoint)
            for port in range(1, 301):
                own = replace(source, source_id=str(uuid.uuid4()), endpoint=f"10.0.0.1:{port}")
                hello = peer_pb2.Hello(source_id=source.source_id, own=codec.source_to_wire(own))
                stream = channel.stream_stream("/mx.wire.v1.Peer/Trade")(metadata=headers())
                for message in (hello, peer_pb2.Hello()):
                    sent = peer_pb2.SwarmMessage(hello=message).SerializeToString()
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await stream.write(sent)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stream.done_writing()
                    async for _ in stream:
                        pass
            await channel.close(None)
            process.terminate()
            said = (await process.stderr.read()).decode()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        lines = [line for line in said.splitlines() if "sent hello to an origin" in line]
        assert 0 < len(lines) < 20, said[:2000]
