"""The fleet over HTTP: a real coordinator, real sources and pulls, and answers as described."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jsonschema
import pytest

from benchmarks.checkpoints import write_checkpoint
from mx.fleet.router import MAX_WATCHES
from tests.support.commands import Run, commands, serve, start_coordinator
from tests.support.daemon import ROOT
from tests.support.web_pages import get, start_web, until

pytestmark = pytest.mark.integration

DESCRIBED = json.loads((ROOT / "mx" / "fleet" / "openapi.json").read_text())


@pytest.fixture
def run() -> Iterator[Run]:
    with commands() as start:
        yield start


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_checkpoint(path, {f"layers.{n}.w": (256, 256) for n in range(3)})
    return path


def check(found: object, schema: str) -> None:
    """Hold an answer against the description, with no field that it does not have."""
    text = json.dumps(DESCRIBED["components"])
    strict = json.loads(
        text.replace('"additionalProperties": true', '"additionalProperties": false')
    )
    where = {"$ref": f"#/components/schemas/{schema}", "components": strict}
    jsonschema.Draft202012Validator(where).validate(found)


def ask(url: str, path: str, schema: str, status: int = 200) -> Any:
    code, headers, body = get(url, path)
    assert code == status, body
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    found = json.loads(body)
    check(found, schema)
    return found


class Events:
    """A reader of `/v1/watch`."""

    def __init__(self, url: str, query: str = "") -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.connection.request("GET", f"/v1/watch{query}")
        self.answer = self.connection.getresponse()

    def next(self) -> dict[str, Any]:
        """Return the next event."""
        name = ""
        while line := self.answer.readline().decode():
            if line.startswith("event: "):
                name = line.removeprefix("event: ").strip()
            elif line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                check(found, "Event")
                assert found["kind"] == name
                return found
        raise EOFError

    def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events up to the first of these kinds."""
        found = [self.next()]
        while found[-1]["kind"] not in kinds:
            found.append(self.next())
        return found

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def test_the_description_describes_itself() -> None:
    jsonschema.Draft202012Validator.check_schema(DESCRIBED["components"]["schemas"]["Replica"])
    named = {part for part in json.dumps(DESCRIBED).split('"') if part.startswith("#/components/")}
    for reference in named:
        assert reference.rpartition("/")[2] in DESCRIBED["components"]["schemas"]


def test_replicas_estimates_and_places(run: Run, checkpoint: Path) -> None:
    coordinator, _ = start_coordinator(run)
    url, _ = start_web(run, coordinator)
    assert ask(url, "/v1/replicas", "Replicas") == {"replicas": []}
    source = serve(run, checkpoint, "o/m", coordinator).json()
    (replica,) = ask(url, "/v1/replicas?model=o/m", "Replicas")["replicas"]
    assert (replica["model"], replica["state"], replica["origin"]) == ("o/m", "loaded", True)
    assert replica["endpoint"] == source["endpoint"]
    assert replica["ready"] == [[0, replica["layers"]]]
    assert ask(url, "/v1/replicas?model=other", "Replicas") == {"replicas": []}

    at = source["endpoint"]
    estimate = ask(url, f"/v1/estimate?model=o/m&at={at}&attach=false", "Estimate")
    assert estimate["ready_s"] > 0 and not estimate["attaches"] and not estimate["why_none"]
    assert {path["source"] for path in estimate["paths"]} == {at}
    assert ask(url, f"/v1/estimate?model=o/m&at={at}", "Estimate")["attaches"]
    place = ask(url, f"/v1/place?model=o/m&host={at}&host={quote(replica['host'])}", "Estimates")
    assert len(place["estimates"]) == 2
    assert json.loads(get(url, "/v1/openapi.json")[2]) == DESCRIBED


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/estimate", 400, "`model` is to be given once"),
        ("/v1/estimate?model=m&model=n&at=h", 400, "`model` is to be given once"),
        ("/v1/estimate?model=m&at=h&attach=no", 400, "it is true or false"),
        ("/v1/place?model=m", 400, "`host` is missing"),
        ("/v1/estimate?model=nothing&at=127.0.0.1", 404, "nothing"),
    ],
)
def test_what_is_refused(run: Run, path: str, status: int, says: str) -> None:
    coordinator, _ = start_coordinator(run)
    url, _ = start_web(run, coordinator)
    error = ask(url, path, "Error", status)["error"]
    assert says in error["message"] + error["hint"]


def test_only_reading_by_this_name(run: Run) -> None:
    coordinator, command = start_coordinator(run)
    url, _ = start_web(run, coordinator)
    assert get(url, "/v1/replicas", "POST")[0] == 405
    assert get(url, "/v1/replicas", host="elsewhere.example")[0] == 421
    assert get(url, "/v1/replicas", sec_fetch_site="cross-site")[0] == 403
    assert get(url, "/v1/nothing")[0] == 404
    assert get(url, "/v1/replicas", "HEAD")[0] == get(url, "/v1/watch", "HEAD")[0] == 200
    command.end()
    error = ask(url, "/v1/replicas", "Error", 502)["error"]
    assert error["message"]


def test_a_watch_tells_what_happens(run: Run, checkpoint: Path) -> None:
    coordinator, command = start_coordinator(run)
    url, page = start_web(run, coordinator)
    origin = serve(run, checkpoint, "m", coordinator)
    events = Events(url, "?model=m")
    known = events.until("synced")
    assert {each["known_before"] for each in known[:-1]} == {True}
    assert known[0]["kind"] == "replica_up" and known[0]["replica"]["origin"]
    held = run("pull", "m", "--coordinator", coordinator, "--no-attach", "--hold", "--json")
    held.json()
    new = events.until("fully_loaded")[-1]["replica"]
    assert new["state"] == "loaded" and not new["origin"]
    assert new["ready"] == [[0, new["layers"]]]
    origin.end()
    lost = events.until("lost")[-1]["replica"]
    assert lost["origin"] and lost["state"] == "lost"
    command.end()
    events.until("disconnected")
    began_s = time.monotonic()
    page.signal(signal.SIGTERM)
    assert page.wait() == 0
    assert time.monotonic() - began_s < 20
    with pytest.raises((EOFError, OSError, http.client.HTTPException)):
        events.until("never")
    events.close()


def test_watches_are_bounded_and_come_back(run: Run) -> None:
    """One address gets a part of them."""
    coordinator, _ = start_coordinator(run)
    url, _ = start_web(run, coordinator)
    readers: list[Events] = []
    while True:
        readers.append(Events(url))
        if readers[-1].answer.status != 200:
            break
        assert readers[-1].until("synced")[-1]["kind"] == "synced"
    assert MAX_WATCHES // 4 < len(readers) <= MAX_WATCHES
    assert "watches are open" in ask(url, "/v1/watch", "Error", 503)["error"]["message"]
    assert ask(url, "/v1/replicas", "Replicas") == {"replicas": []}
    readers.pop(0).close()
    until(lambda: get(url, "/v1/watch", "HEAD")[0] == 200, "free watch")
    for each in readers:
        each.close()


def test_one_who_reads_nothing_hinders_nobody(run: Run, checkpoint: Path) -> None:
    coordinator, _ = start_coordinator(run)
    url, _ = start_web(run, coordinator)
    host, _, port = urlsplit(url).netloc.rpartition(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.sendall(f"GET /v1/watch HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        events = Events(url)
        events.until("synced")
        serve(run, checkpoint, "m", coordinator)
        events.until("source_up")
        events.close()
