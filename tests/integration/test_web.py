"""`mx web`: a real coordinator, real pulls, a real Chromium."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from mx.core.budget import BudgetShares
from mx.operations.web.server import MAX_CONNECTIONS, REQUEST_S
from mx.transport import TlsFiles
from tests.support.certificates import Authority
from tests.support.chromium import chromium, opened
from tests.support.commands import (
    Run,
    commands,
    environment,
    free_port,
    serve,
    start_coordinator,
)
from tests.support.daemon import ROOT
from tests.support.web_pages import get, start_web, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration

LIVE = "#state[data-state=live]"
LOST = "#state[data-state=lost]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@contextmanager
def fleet(coordinator: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a simulated fleet at a coordinator."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.web_fleet", coordinator, *arguments],
        cwd=ROOT,
        env=environment(PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "transports")))),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# -- in a browser ---------------------------------------------------------------------------------


def ready_layers(page: Page) -> int:
    strip = page.locator('#pulls li[data-phase="running"] .strip').first
    return int(strip.get_attribute("aria-valuenow") or 0)


def test_a_running_pull_fills_up_on_the_page(browser: Browser, run: Run, served: str) -> None:
    url, command = start_web(run, served)
    with opened(browser, url, viewport={"width": 1200, "height": 900}) as page:
        page.wait_for_selector(LIVE)
        page.wait_for_selector("#models li >> text=slow")
        until(lambda: page.locator("#sources li").count() == 2, "two sources")
        assert page.inner_text("#pulls .empty").startswith("No pull runs now. mx pull m ")
        pull = run("pull", "slow", "--coordinator", served, "--transport", "tcp", "--no-attach")
        page.wait_for_selector('#pulls li[data-phase="running"] >> text=slow')
        first = ready_layers(page)
        until(lambda: ready_layers(page) > first, "more layers")
        marks = page.locator('#pulls li[data-phase="running"] .strip .full').first
        assert (marks.get_attribute("d") or "").count("M") >= first
        page.wait_for_selector("#reads path.edge", state="attached")
        assert "1 read between 2 processes" in (
            page.get_attribute("#reads svg", "aria-label") or ""
        )
        page.wait_for_selector("#sources li >> text=1 reader")
        # Nothing goes over the edge of a narrow screen.
        page.set_viewport_size({"width": 420, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 420
        pull.signal(signal.SIGTERM)
        pull.wait()
        page.wait_for_selector('#pulls li[data-phase="failed"]')
        page.wait_for_selector("#pulls li.ended >> text=ago")  # the coordinator has forgotten it
        command.signal(signal.SIGTERM)
        page.wait_for_selector(LOST)
        assert "mx web has not answered since" in page.inner_text("#trouble")
    assert command.wait() == 0
    assert "Traceback" not in command.err


def test_the_page_says_that_the_coordinator_is_gone_and_goes_on_by_itself(
    browser: Browser, run: Run, checkpoint: Path
) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    url, _ = start_web(run, address)  # before there is a coordinator
    with opened(browser, url) as page:
        page.wait_for_selector(LOST)
        assert "The coordinator has not answered since" in page.inner_text("#trouble")
        assert address in page.inner_text("#trouble")
        _, coordinator = start_coordinator(run, port=port)
        page.wait_for_selector(LIVE)
        assert page.is_hidden("#trouble")
        source = serve(run, checkpoint, "m", address)
        page.wait_for_selector("#sources li >> text=origin")
        coordinator.signal(signal.SIGKILL)
        coordinator.wait()
        page.wait_for_selector(LOST)
        assert page.locator("#sources li").count() == 1  # what it knew stays, and is said to be old
        assert "What is shown is old" in page.inner_text("#trouble")
        source.end()
        start_coordinator(run, port=port)  # of another epoch, and without that source
        page.wait_for_selector(LIVE)
        until(lambda: page.locator("#sources li").count() == 0, "end of the source")
        until(lambda: page.locator("#models li").count() == 0, "end of the model")


HOSTILE = (
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=2</script>",
    "javascript&#58;alert(1)\"' onmouseover=window.hacked=3",
)


def test_what_peers_say_is_text_and_never_markup(browser: Browser, run: Run) -> None:
    address, _ = start_coordinator(run)
    url, _ = start_web(run, address)
    names = [word for name in HOSTILE for word in ("--name", name)]
    load = ("--sources", "6", "--pulls", "3", *names)
    with fleet(address, *load), opened(browser, url, expected="TrustedHTML") as page:
        shown = page.locator("#sources .name")
        until(lambda: set(HOSTILE) <= set(shown.all_text_contents()), "names as they are")
        page.wait_for_selector('#pulls li[data-phase="running"]')
        page.click("#models li button")
        assert page.input_value("#filter") in HOSTILE
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script, main iframe, main a").count() == 0
        # The page's own policy refuses markup, and scripts that are not its files.
        assert (
            page.evaluate(
                """() => { try { document.body.innerHTML = '<b>'; return 'taken'; }
                       catch (error) { return error.name; } }"""
            )
            == "TypeError"
        )
        assert page.locator("h1").inner_text() == "mx"


LONG_NAMES = (
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "meta-llama/Llama-3.1-70B-Instruct-FP8",
    "Qwen/Qwen2.5-0.5B",
)


def test_a_filter_is_in_the_address_and_says_what_it_finds_nothing_of(
    browser: Browser, run: Run
) -> None:
    address, _ = start_coordinator(run)
    url, _ = start_web(run, address)
    names = [word for name in LONG_NAMES for word in ("--name", name)]
    with fleet(address, "--sources", "3", "--pulls", "3", *names), opened(browser, url) as page:
        page.wait_for_selector("#reads path.edge", state="attached")
        until(lambda: page.locator("#models li").count() == 3, "three models")
        page.fill("#filter", 'a & "b"')
        for noun in ("pull", "read", "model", "source"):
            said = page.locator(f"#{noun}s .unmatched:visible")
            said.wait_for()
            assert said.inner_text() == f'No {noun} matches the filter “a & "b"”.'
            assert page.is_hidden(f"#{noun}s .empty")
        page.reload()
        assert page.input_value("#filter") == 'a & "b"'
        page.goto(f"{url}?filter=qwen2.5")
        until(lambda: page.locator("#models li").count() == 1, "one model")
        assert page.is_hidden("#models .unmatched") and page.is_hidden("#sources .unmatched")
        page.fill("#filter", "")
        until(lambda: page.evaluate("location.href") == url, "an address without a filter")
        until(lambda: page.locator("#models li").count() == 3, "three models")


def test_columns_do_not_wrap_at_1200_pixels(browser: Browser, run: Run) -> None:
    address, _ = start_coordinator(run)
    url, _ = start_web(run, address)
    names = [word for name in LONG_NAMES for word in ("--name", name)]
    load = ("--sources", "3", "--pulls", "3", "--domain", ".us-east-1.compute.internal", *names)
    with (
        fleet(address, *load),
        opened(browser, url, viewport={"width": 1200, "height": 900}) as page,
    ):
        until(lambda: page.locator("#sources li").count() == 3, "sources")
        until(lambda: page.locator("#pulls li").count() >= 3, "pulls")
        page.wait_for_selector("#sources li >> text=reader")
        for section in ("pulls", "models", "sources"):
            heights = page.evaluate(
                """(rows) => [...document.querySelectorAll(rows)].map((row) => row.clientHeight)""",
                f"#{section} li",
            )
            assert max(heights) - min(heights) <= 1, (section, heights)
        assert page.evaluate("document.documentElement.scrollWidth") == 1200


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_sources_and_hundreds_of_pulls_do_not_let_the_page_grow(
    browser: Browser, run: Run
) -> None:
    address, _ = start_coordinator(run)
    url, command = start_web(run, address)
    load = ("--sources", "1000", "--pulls", "300", "--pull-s", "6")
    with fleet(address, *load), opened(browser, url) as page:
        until(lambda: page.inner_text("#total-sources") == "1,000", "a thousand sources")
        until(lambda: int(page.inner_text("#total-pulls")) > 200, "hundreds of pulls")
        assert page.locator("#pulls li").count() == 12
        assert page.locator("#sources li").count() == 20
        page.click("#sources .more")
        until(lambda: page.locator("#sources li").count() == 80, "more sources")
        page.fill("#filter", "host-999")
        until(lambda: page.locator("#sources li").count() == 1, "the one source")
        page.fill("#filter", "")
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        devtools.send("HeapProfiler.enable")

        def size() -> tuple[float, float, float]:
            devtools.send("HeapProfiler.collectGarbage")
            metrics = devtools.send("Performance.getMetrics")["metrics"]
            found = {each["name"]: each["value"] for each in metrics}
            return found["Nodes"], found["JSHeapUsedSize"], found["JSEventListeners"]

        def sizes() -> list[tuple[float, ...]]:
            """Return each figure's sizes in ten seconds: how many pulls there are goes up and
            down."""
            seen = []
            for _ in range(4):
                time.sleep(2.5)
                seen.append([size() for _ in range(2)][-1])
            return [*zip(*seen, strict=True)]

        before = sizes()  # pulls of six seconds come and go, and as many end
        time.sleep(20)
        for was, now in zip(before, sizes(), strict=True):
            assert min(now) < 1.3 * min(was) + 1000
        drawn = page.evaluate("document.querySelectorAll('*').length")
        assert drawn < 5000
        assert not any("Traceback" in text for text in (command.err, command.out))


# -- without one ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_url(served: str) -> Iterator[str]:
    with commands() as run:
        yield start_web(run, served)[0]


def test_answers_carry_a_strict_policy(page_url: str) -> None:
    status, headers, body = get(page_url)
    assert status == 200
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "access-control-allow-origin" not in headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers
    assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src=\"/)", body)
    for path in re.findall(r'(?:href|src)="(/[^"#]+)"', body):
        status, headers, text = get(page_url, path)
        assert (status, headers["content-security-policy"]) == (200, policy)
        assert "innerHTML" not in text
        assert get(page_url, path, if_none_match=headers["etag"])[0] == 304


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/", "GET", {"host": "evil.example"}, 421),
        ("/", "GET", {"host": "evil.example:7680"}, 421),
        ("/events", "GET", {"host": "127.0.0.1.evil.example"}, 421),
        ("/", "GET", {"host": "localhost:1"}, 200),
        ("/", "GET", {"host": "[::1]:7680"}, 200),
        ("/", "GET", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}, 200),
        ("/", "GET", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"}, 403),
        ("/events", "GET", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"}, 403),
        ("/events", "GET", {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate"}, 403),
        ("/", "POST", {}, 405),
        ("/events", "OPTIONS", {"origin": "http://evil.example"}, 405),
        ("/events", "DELETE", {}, 405),
        ("/../server.py", "GET", {}, 404),
        ("/%2e%2e/server.py", "GET", {}, 404),
        ("/" + "x" * 5000, "GET", {}, 404),
        ("/", "HEAD", {}, 200),
        ("/events", "HEAD", {}, 200),
    ],
)
def test_what_is_answered(
    page_url: str, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    found, answer, body = get(page_url, path, method, **headers)
    assert found == status
    assert "access-control-allow-origin" not in answer
    assert "content-security-policy" in answer
    if method == "HEAD":
        assert body == ""


def test_too_many_browsers_and_connections_are_refused(page_url: str) -> None:
    host, port = urlsplit(page_url).hostname, urlsplit(page_url).port
    streams = []
    try:
        refused = ""
        for _ in range(40):
            connection = http.client.HTTPConnection(f"{host}:{port}", timeout=30)
            streams.append(connection)
            connection.request("GET", "/events")
            answer = connection.getresponse()
            if answer.status != 200:
                assert answer.status == 503
                refused = answer.read().decode()
                break
            assert answer.readline() == b"event: connection\n"
        assert "its limit for one principal" in refused
        assert get(page_url)[0] == 200  # the files still are
    finally:
        for connection in streams:
            connection.close()

    def admitted() -> bool:
        connection = http.client.HTTPConnection(f"{host}:{port}", timeout=30)
        try:
            connection.request("GET", "/events")
            return connection.getresponse().status == 200
        finally:
            connection.close()

    until(admitted, "place for another browser")
    many = [socket.create_connection((str(host), int(port or 0))) for _ in range(200)]
    try:
        ended = 0
        for each in many[-50:]:
            each.settimeout(5)
            try:
                ended += each.recv(1) == b""
            except ConnectionResetError:
                ended += 1
        assert ended == 50 < 200 - BudgetShares(MAX_CONNECTIONS).most
    finally:
        for each in many:
            each.close()


@pytest.mark.long
def test_silent_connections_end(page_url: str) -> None:
    host, port = urlsplit(page_url).hostname, urlsplit(page_url).port
    began_s = time.monotonic()
    silent = [socket.create_connection((str(host), int(port or 0))) for _ in range(3)]
    try:
        silent[1].sendall(b"GET / HTTP/1.1\r\nhost: lo")
        for each in silent:
            each.settimeout(60)
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""
        assert time.monotonic() - began_s > REQUEST_S / 2
    finally:
        for each in silent:
            each.close()


# -- where it listens -----------------------------------------------------------------------------


def test_it_refuses_to_listen_beyond_this_machine_without_protection(run: Run) -> None:
    command = run("web", "--listen", "0.0.0.0:0")
    assert command.wait() == 2
    assert "refusing to listen on 0.0.0.0:0 without TLS" in command.err
    assert "--insecure" in command.err


def test_a_port_that_is_taken_is_named(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = run("web", "--listen", f"127.0.0.1:{port}")
        assert command.wait() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in command.err
    assert "Traceback" not in command.err


def _context(files: TlsFiles, *, shows: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.authority)
    if shows:
        context.load_cert_chain(files.certificate, files.key)
    return context


def _https(port: int, context: ssl.SSLContext, host: str) -> tuple[int, str]:
    """Return the status of an answer, and the serial number of the server's certificate."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    try:
        connection.request("GET", "/", headers={"host": host})
        shown = connection.sock.getpeercert() or {}
        return connection.getresponse().status, str(shown["serialNumber"])
    finally:
        connection.close()


def test_beyond_this_machine_both_ends_show_certificates_which_are_taken_up_anew(
    run: Run, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ours")
    files = authority.certificate("web", "subjectAltName=IP:127.0.0.1,DNS:page.example")
    visitor = authority.certificate("visitor")
    stranger = Authority(tmp_path, "theirs").certificate("stranger")
    flags = ("--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority)
    port = free_port()
    command = run("web", "--listen", f"0.0.0.0:{port}", "--json", *flags)
    assert command.json()["url"] == f"https://page.example:{port}/"
    status, first = _https(port, _context(visitor), f"page.example:{port}")
    assert status == 200
    assert _https(port, _context(visitor), "evil.example")[0] == 421
    other = ssl.create_default_context(cafile=files.authority)
    other.load_cert_chain(stranger.certificate, stranger.key)
    for context in (_context(visitor, shows=False), other):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            _https(port, context, "page.example")
    assert authority.certificate("web", "subjectAltName=IP:127.0.0.1,DNS:page.example") == files
    until(lambda: _https(port, _context(visitor), "page.example")[1] != first, "new certificate")
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert "Traceback" not in command.err
