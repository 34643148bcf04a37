"""Metrics: real processes, scraped; the dashboard shows nothing that they do not have."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import mx
from benchmarks.checkpoints import write_checkpoint
from mx import api, config
from mx.errors import MxError, install_hint
from mx.metrics import exporting, listener
from mx.transport import TlsFiles
from mx.wire.client import CoordinatorClient
from tests.support.certificates import Authority
from tests.support.commands import Run, environment, free_port, serve, start_coordinator
from tests.support.daemon import ROOT
from tests.support.outcomes import until
from tests.support.records import by_digest, make_documents, make_record, register_at

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NBYTES = 4 * 1024 * 1024 * 2


def fetched(address: str, context: ssl.SSLContext | None = None) -> str:
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(f"{scheme}://{address}/metrics", timeout=30, context=context) as it:
        text = it.read()
    assert isinstance(text, bytes)
    return text.decode()


def scraped(address: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(fetched(address))
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model.safetensors"
    write_checkpoint(path, {f"model.layers.{i}.w": (1024, 1024) for i in range(4)})
    return path


def at() -> str:
    return f"127.0.0.1:{free_port()}"


# -- what there is, and the dashboard -------------------------------------------------------------

_METRIC = re.compile(r"\b(?:mx|process)_[a-z_0-9]+")
#: A metric with its matchers.
_MATCHED = re.compile(r"\b((?:mx|process)_[a-z_0-9]+)\{([^}]*)\}")
_GROUPED = re.compile(r"by \(([^)]*)\)")
#: What Prometheus itself adds to each series, and what is only there within a histogram.
_ADDED = {"instance", "job", "le"}
#: Metrics that engines export themselves (tests/integration/test_engine_metrics.py).
_OF_ENGINES = {"mx_replica_load_seconds": {"rank"}}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    found = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    return [
        *found,
        *(v["definition"] for v in dashboard["templating"]["list"] if "definition" in v),
    ]


def check_dashboard(labels: dict[str, set[str]]) -> None:
    """Check each expression against the labels of what is exported, by metric."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "mx.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    shown = set[str]()
    for expression in expressions(dashboard):
        names = set(_METRIC.findall(expression))
        assert names, expression
        assert names <= set(labels), expression
        shown |= names
        used = {each.strip() for by in _GROUPED.findall(expression) for each in by.split(",")}
        for _, matchers in _MATCHED.findall(expression):
            used |= {each.partition("=")[0].rstrip("!~") for each in matchers.split(",")}
        for name in names:
            assert used - _ADDED <= labels[name], expression
    page = (ROOT / "docs" / "metrics.md").read_text()
    parts = re.compile(r"_(sum|count|bucket)$")
    named = {parts.sub("", name) for name in labels if not name.endswith("_created")}
    assert not [each for each in named if each.startswith("mx_") and f"`{each}`" not in page]
    ours = {each.removesuffix("_bucket") for each in shown if each.startswith("mx_")}
    unshown = {
        name for name in labels
        if name.startswith("mx_") and not name.endswith(("_created", "_sum", "_count", "_bucket"))
    } - ours  # fmt: skip
    assert unshown == {"mx_coordinator_state_info", "mx_pulls", "mx_sources", "mx_tasks",
                       "mx_cache_models", "mx_cache_arriving"}  # fmt: skip


def test_each_process_has_metrics_and_the_dashboard_shows_them(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    where = [at() for _ in range(4)]
    coordinator, _ = start_coordinator(run, "--metrics", where[0])
    serve(run, checkpoint, "tiny", coordinator, "--metrics", where[1])
    pulling = ("pull", "tiny", "--coordinator", coordinator, "--no-attach", "--transport", "tcp")
    holding = run(*pulling, "--hold", "--json", "--metrics", where[2])
    holding.json()
    socket_path = str(tmp_path / "cache.sock")
    cache = run(
        "serve", "--cache", "--memory", "64MB", "--coordinator", coordinator, "--json",
        "--cache-socket", socket_path, "--metrics", where[3],
    )  # fmt: skip
    cache.json()
    nothing = run("pull", "nothing", "--coordinator", coordinator)
    assert nothing.wait(60) == 3

    gave, got = scraped(where[1]), scraped(where[2])
    assert of(gave, "mx_transfer_bytes_total", transport="tcp", direction="given") == NBYTES
    assert of(got, "mx_transfer_bytes_total", transport="tcp", direction="received") == NBYTES
    assert of(gave, "mx_source_held_bytes", model="tiny") == NBYTES
    assert of(got, "mx_pulls_ended_total", outcome="complete") == 1
    assert of(got, "mx_pull_ready_seconds_count") == 1
    first = of(got, "mx_pull_first_layer_seconds_sum")
    assert 0 < first <= of(got, "mx_pull_ready_seconds_sum")
    assert of(scraped(where[3]), "mx_cache_budget_bytes") == 64_000_000
    listed = scraped(where[0])
    assert of(listed, "mx_coordinator_sources", model="tiny") == 2
    assert of(listed, "mx_coordinator_registrations_total") == 2
    assert of(listed, "mx_coordinator_streams", kind="heartbeat") == 2
    assert of(listed, "mx_requests_refused_total", error="UnknownModelError") == 1
    assert of(listed, "mx_coordinator_state_info", kind="memory") == 1

    holding.signal(15)
    assert holding.wait() == 0
    until(
        lambda: of(scraped(where[0]), "mx_coordinator_sources_gone_total", reason="deregistered"),
        "source that has left",
    )
    labels = defaultdict[str, set[str]](set)
    for samples in (gave, got, scraped(where[0]), scraped(where[3])):
        for name, pairs in samples:
            labels[name] |= {label for label, _ in pairs}
    for name, added in _OF_ENGINES.items():
        labels[name] |= added
    check_dashboard(dict(labels))


def test_an_embedded_coordinator_is_measured_too(address: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    settings = config.load({"name_key": str(tmp_path / "name.key"), "receipt_key": ""})
    assert not [name for name, _ in scraped(address) if name.startswith("mx_coordinator")]
    # Nothing listens at this default, so that it is embedded there.
    settings = replace(settings, coordinator=at())
    with mx.serve({"w": torch.zeros(4096)}, model="w", settings=settings) as source:
        assert source.embedded
        until(lambda: of(scraped(address), "mx_coordinator_sources", model="w"), "source")
        assert of(scraped(address), "mx_sources") == 1
    until(lambda: not of(scraped(address), "mx_sources"), "end")


# -- labels of strangers --------------------------------------------------------------------------


async def test_names_that_a_stranger_makes_up_become_few_series(run: Run) -> None:
    where = at()
    coordinator, _ = await asyncio.to_thread(start_coordinator, run, "--metrics", where)
    documents = make_documents("A")
    client = CoordinatorClient(coordinator)
    try:

        async def one(number: int) -> None:
            record = make_record(documents, name=f'made-up "{number}" {{x="y"}}')
            await register_at(
                client, record, by_digest(documents), source_secret=number.to_bytes(32, "big")
            )

        for begin in range(0, 300, 50):
            batch = (one(begin + number) for number in range(50))
            await asyncio.gather(asyncio.to_thread(scraped, where), *batch)
    finally:
        await client.close()

    def all_there() -> bool:
        return of(scraped(where), "mx_coordinator_models") == 300

    await asyncio.to_thread(until, all_there, "all names")
    samples = await asyncio.to_thread(scraped, where)
    sources = {key: value for key, value in samples.items() if key[0] == "mx_coordinator_sources"}
    assert len(sources) == 201
    assert sum(sources.values()) == of(samples, "mx_coordinator_models") == 300
    assert of(samples, "mx_coordinator_sources", model="other") == 100


# -- addresses, TLS, and what is missing ----------------------------------------------------------


def test_addresses_are_refused_in_words(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        command = run("--listen", at(), "--metrics", used, daemon=True)
        assert command.wait() == 1
        assert f"metrics can't be served at {used}: Address already in use" in command.err
        assert "--metrics" in command.err
    command = run("--listen", at(), "--metrics", "0.0.0.0:0", daemon=True)
    assert command.wait() == 2
    assert "refusing to listen on 0.0.0.0:0 without TLS" in command.err
    command = run("--listen", at(), "--metrics", "nowhere", daemon=True)
    assert command.wait() == 2
    command = run("pull", "tiny", "--metrics", at())
    assert command.wait() == 2
    assert "--hold" in command.err
    for each in ("Traceback", "Error:"):
        assert each not in command.err


def test_without_prometheus_client_the_extra_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')\n")
    settings = environment()
    path = f"{tmp_path}:{settings['PYTHONPATH']}"
    code = "from mx.cli import coordinator_main; coordinator_main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--listen", at(), "--metrics", at()],
        env=settings | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert install_hint("metrics") in done.stderr
    assert "Traceback" not in done.stderr


def context_of(files: TlsFiles, *, shows: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.authority)
    if shows:
        context.load_cert_chain(files.certificate, files.key)
    return context


def test_tls_asks_for_a_certificate_and_reads_the_files_again(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server, client = ours.certificate("server"), ours.certificate("client")
    stranger = theirs.certificate("stranger")
    given = config.load(
        {
            "metrics": "127.0.0.1:0", "tls_cert": server.certificate, "tls_key": server.key,
            "tls_ca": server.authority,
        }
    )  # fmt: skip
    with exporting(given) as address:
        assert "mx_build_info" in fetched(address, context_of(client))
        for wrong in (
            context_of(client, shows=False),
            context_of(TlsFiles(stranger.certificate, stranger.key, server.authority)),
        ):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                fetched(address, wrong)
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as plain:  # no handshake
            plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionError):  # it has hung up on the rest
                assert b"mx_" not in plain.recv(4096)
        renewed = ours.certificate("renewed")
        for old, new in zip(
            (server.certificate, server.key), (renewed.certificate, renewed.key), strict=True
        ):
            Path(old).write_bytes(Path(new).read_bytes())
        raw = context_of(client).wrap_socket(
            socket.create_connection((host, int(port))), server_hostname=host
        )
        with raw:
            shown = raw.getpeercert() or {}
        assert (("commonName", "renewed"),) in shown["subject"]
        ours.postpone(server, 3600.0)  # not valid yet
        assert answers(address, context_of(client))
        Path(server.key).write_text("half of a key")
        assert answers(address, context_of(client))


# -- clients that hog, and a loop that is busy ----------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    with exporting(config.load({"metrics": "127.0.0.1:0"})) as found:
        yield found


def test_clients_that_say_nothing_keep_no_place(address: str) -> None:
    host, _, port = address.partition(":")
    most = 3 * listener.MOST_CONNECTIONS
    silent = [socket.create_connection((host, int(port))) for _ in range(most)]
    try:
        assert answers(address)
        silent[0].settimeout(30)
        with contextlib.suppress(ConnectionError):
            assert silent[0].recv(1) == b""  # it has made room
    finally:
        for each in silent:
            each.close()


def answers(address: str, context: ssl.SSLContext | None = None) -> bool:
    try:
        return "mx_build_info" in fetched(address, context)
    except (OSError, urllib.error.URLError):
        return False


def test_what_is_no_request_for_metrics_gets_an_answer(address: str) -> None:
    host, _, port = address.partition(":")

    def says(request: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as it:
            it.sendall(request)
            with contextlib.suppress(OSError):  # it has answered, and closed
                it.shutdown(socket.SHUT_WR)
            found = b""
            while more := it.recv(1 << 16):
                found += more
            return found

    assert says(b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 501 ")
    host_header = b"Host: localhost\r\n"
    assert says(b"GET / HTTP/1.1\r\n" + host_header + b"\r\n").startswith(b"HTTP/1.0 404 ")
    assert b"mx_" not in says(b"\r\n\r\n")
    assert b"mx_" not in says(b"GET /met")
    head = says(b"HEAD /metrics HTTP/1.1\r\n" + host_header + b"\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK") and b"mx_" not in head
    open_metrics = b"Accept: application/openmetrics-text; version=1.0.0"
    open_metrics += b"\r\n" + host_header
    assert says(b"GET /metrics HTTP/1.1\r\n" + open_metrics + b"\r\n").endswith(b"# EOF\n")
    with contextlib.suppress(ConnectionError):  # a request without an end
        assert b"mx_" not in says(b"GET /metrics HTTP/1.1\r\n" + b"x" * 100_000)
    assert answers(address)


def status(address: str, hosts: list[str], context: ssl.SSLContext | None = None) -> int:
    """Return how a request with these Host headers is answered."""
    kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
    options: dict[str, Any] = {} if context is None else {"context": context}
    with contextlib.closing(kind(address, timeout=30, **options)) as connection:
        connection.putrequest("GET", "/metrics", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status


@pytest.mark.parametrize(
    ("hosts", "answer"),
    [
        (["evil.example"], 421),
        (["127.0.0.1.evil.example:7690"], 421),
        (["127.0.0.1", "evil.example"], 421),
        ([""], 421),
        ([], 421),
        (["localhost:1"], 200),
        (["LOCALHOST."], 200),
        (["[::1]:7690"], 200),
        (["10.0.0.7"], 200),
        ([socket.gethostname()], 200),
    ],
    ids=str,
)
def test_another_sites_name_reads_no_metrics(address: str, hosts: list[str], answer: int) -> None:
    """Its owner can have it mean this process, and have a browser here open it."""
    assert status(address, hosts) == answer


def test_names_of_the_certificate_are_names_of_the_metrics(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    sans = "subjectAltName=IP:127.0.0.1,DNS:coordinator.example,DNS:*.pods.example"
    server, client = ours.certificate("server", sans), ours.certificate("client")
    given = config.load(
        {
            "metrics": "127.0.0.1:0", "tls_cert": server.certificate, "tls_key": server.key,
            "tls_ca": server.authority,
        }
    )  # fmt: skip
    with exporting(given) as address:
        for host, answer in (
            ("coordinator.example:7690", 200),
            ("a.pods.example", 200),
            ("evil.example", 421),
        ):
            assert status(address, [host], context_of(client)) == answer


def test_a_busy_loop_is_not_waited_for_without_end(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mx.metrics.exporter.BUSY_S", 0.2)
    gate = threading.Event()

    async def block() -> None:
        gate.wait(60)

    loop = mx.runtime.acquire()
    try:
        blocking = loop.submit(block())
        with pytest.raises(urllib.error.HTTPError, match="503"):
            fetched(address)
        gate.set()
        blocking.result(60)
    finally:
        gate.set()
        mx.runtime.release(loop)
    until(lambda: answers(address), "answer", 60)


def test_what_engines_in_this_process_count_is_there(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = pytest.importorskip("mx.engines.compiling")
    monkeypatch.setitem(compiling._counts, "used", 3)
    samples = scraped(address)
    assert of(samples, "mx_compile_caches_total", outcome="used") == 3
    assert of(samples, "mx_compile_caches_total", outcome="none") == 0


# -- pulls that fail ------------------------------------------------------------------------------


def test_digest_failures_and_failed_pulls_are_counted(address: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = {f"w{number}": torch.zeros(1 << 20) for number in range(4)}
    settings = config.load({"name_key": str(tmp_path / "name.key")})
    before = scraped(address)
    settings = replace(settings, coordinator=at())
    with mx.serve(weights, model="w", settings=settings, copy=False) as source:
        weights["w2"][100] = 1.0  # outside `changing`: no digest of it is right any more
        with (
            pytest.raises(MxError) as error,
            mx.pull("w", peer=source.endpoint, attach=False, settings=settings) as pull,
        ):
            pull.wait(60)
    after = scraped(address)
    kind = type(error.value).__name__
    assert of(after, "mx_pulls_ended_total", outcome=kind) == 1
    assert of(after, "mx_digest_failures_total") > of(before, "mx_digest_failures_total")
    assert of(after, "mx_pull_retries_total") >= of(after, "mx_digest_failures_total")
    assert of(after, "mx_pulls") == 0


def test_bytes_are_counted_while_they_come_and_never_go_down(
    run: Run, address: str, checkpoint: Path
) -> None:
    coordinator, _ = start_coordinator(run)
    serve(run, checkpoint, "tiny", coordinator, "--max-bandwidth", "4MB/s")

    def received(samples: Samples) -> float:
        return of(samples, "mx_transfer_bytes_total", transport="tcp", direction="received")

    seen = [received(scraped(address))]
    began = seen[0]
    with api.pull("tiny", coordinator=coordinator, attach=False, transport="tcp") as pull:
        while pull.report is None:
            samples = scraped(address)
            seen.append(received(samples))
            if pull.report is None:
                assert of(samples, "mx_pulls") <= 1
        pull.wait(60)
    until(lambda: received(scraped(address)) - began == NBYTES, "all bytes")
    assert seen == sorted(seen)
    assert any(began < each < began + NBYTES for each in seen)
