"""examples/router.py as a user starts it: the demonstration, and over replicas that one has."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import mx
from tests.integration.example_router import Router
from tests.support.commands import Run, environment, serve, start_coordinator

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def demo() -> Iterator[Router]:
    """The demonstration; its processes end with it."""
    router = Router("--listen", "127.0.0.1:0")
    yield router
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(router.process.pid)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert router.end() == 0
    assert len(children) >= 3 and not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_requests_are_answered_by_a_replica_that_still_loads(demo: Router) -> None:
    demo.until(lambda: any(each["accepted_early"] for each in demo.replicas()), "early answer")
    demo.until(lambda: "began with " in demo.said, "word of it")
    assert max(map(len, demo.said.splitlines())) < 80, demo.said
    demo.until(lambda: demo.replicas()[0]["fully_loaded"], "replica that is loaded")
    (first, *_) = demo.replicas()
    assert first["layers"] == 12 and set(first["layer_s"]) == {str(n) for n in range(12)}
    kinds = [kind for kind, _ in first["marks"]]
    assert kinds.index("accepts_requests") < kinds.index("sent") < kinds.index("fully_loaded")
    status, body = demo.ask("POST", "/generate", b'{"prompt": "hello"}')
    assert status == 200 and json.loads(body)["layers"] == 12
    assert demo.ask("POST", "/generate", b"[")[0] == 400  # the replica's answer
    status, body = demo.ask("GET", "/estimate")
    assert status == 200 and json.loads(body)["seconds_to_ready"] > 0


def test_the_page_its_events_and_the_metrics(demo: Router) -> None:
    status, page = demo.ask("GET", "/")
    assert status == 200 and b"EventSource" in page
    # Nothing is fetched from elsewhere.
    assert b"src=" not in page and b"@import" not in page and page.count(b"http") == 1
    demo.until(demo.replicas, "replica")
    status, metrics = demo.ask("GET", "/metrics")
    assert status == 200 and b"mx_router_connected 1\n" in metrics
    assert b"mx_replica_layers{" in metrics
    host, _, port = demo.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\n\r\n")
        with connection.makefile("rb") as stream:
            lines = iter(stream.readline, b"")
            assert b"text/event-stream" in b"".join(iter(lambda: next(lines), b"\r\n"))
            first = json.loads(next(lines).removeprefix(b"data: "))
            assert first["kind"] == "all" and first["replicas"]
            assert next(lines) == b"\n"
            assert "at_s" in json.loads(next(lines).removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /secret HTTP/1.1\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET /estimate?at=mars HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_wrong_requests_get_a_status(demo: Router, request_bytes: bytes, status: int) -> None:
    host, _, port = demo.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(request_bytes)
        assert connection.recv(12) == b"HTTP/1.1 %d" % status


def test_a_replica_that_claims_a_port_where_nothing_listens_gets_no_answer_for_long(
    run: Run, checkpoint: Path
) -> None:
    address, _ = start_coordinator(run)
    serve(run, checkpoint, "m", address)
    router = Router("m", "--coordinator", address)
    script = Path(__file__).with_name("replica.py")
    liar = subprocess.Popen(
        [sys.executable, str(script), address, "m", "plain", "0"],
        stdin=subprocess.PIPE,
        env=environment(),
    )
    try:
        router.until(lambda: any(r["accepts_requests"] for r in router.replicas()), "replica")
        status, body = router.ask("POST", "/generate", b"{}")
        assert status == 503 and b"no replica of m takes requests now" in body
        assert [each["failed"] for each in router.replicas()] == [1]
        assert b"mx_replica_requests_failed_total" in router.ask("GET", "/metrics")[1]
    finally:
        liar.kill()
        liar.wait()
        assert liar.stdin is not None
        liar.stdin.close()
        assert router.end() == 0


class Engine(http.server.BaseHTTPRequestHandler):
    """A replica's server: its answer is in two parts, of which the second waits for `release`."""

    protocol_version = "HTTP/1.1"
    release = threading.Event()

    def do_POST(self) -> None:
        wanted = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(int(wanted) if wanted.isdigit() else 200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"4\r\nfrom\r\n")
        if wanted == "wait":
            assert self.release.wait(60)
        if wanted != "break":
            self.wfile.write(b"3\r\n me\r\n0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def test_answers_are_passed_on_as_they_come_and_bad_requests_rest_no_replica(
    run: Run, checkpoint: Path
) -> None:
    address, _ = start_coordinator(run)
    serve(run, checkpoint, "m", address)
    router = Router("m", "--coordinator", address)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with mx.pull("m", coordinator=address) as pull:
            pull.wait(60)
            pull.accept_requests(server.server_port)
            router.until(lambda: any(r["accepts_requests"] for r in router.replicas()), "replica")
            for status in (400, 422, 404):  # no status is held against it
                assert router.ask("POST", "/generate", str(status).encode()) == (status, b"from me")
            (replica,) = router.replicas()
            assert (replica["failed"], replica["answered"]) == (0, 3)
            connection = http.client.HTTPConnection(router.address, timeout=60)
            connection.request("POST", "/generate", b"wait")
            answer = connection.getresponse()
            assert answer.getheader("Content-Type") == "text/event-stream"
            assert answer.read(4) == b"from"
            Engine.release.set()
            assert answer.read() == b" me"
            connection.close()
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                router.ask("POST", "/generate", b"break")
            assert [each["failed"] for each in router.replicas()] == [1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        assert router.end() == 0


def test_without_a_coordinator_the_page_says_that_none_answers() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        router = Router("m", "--coordinator", f"127.0.0.1:{closed.getsockname()[1]}")
        try:
            status, body = router.ask("GET", "/replicas")
            assert status == 200 and json.loads(body)["connected"] is False
            assert router.ask("POST", "/generate")[0] == 503
            assert b"mx_router_connected 0\n" in router.ask("GET", "/metrics")[1]
        finally:
            assert router.end() == 0
