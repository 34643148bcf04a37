"""Processes that name other hosts as where they take requests: no router sends anything there."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

import mx
from mx import api, config
from mx.core.versions import own
from mx.testing.certificates import certificates
from mx.transport import TlsFiles
from mx.wire.address import read_tls
from mx.wire.v1 import coordinator_pb2 as pb
from tests.integration.example_router import Router
from tests.support.daemon import daemon
from tests.support.outcomes import until
from tests.support.stubs import blocking_stub

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PROMPT = b'{"prompt": "the secret of a user"}'
#: An address of this machine that no interface lists: another host, to all that look.
ELSEWHERE = "127.0.0.2"


class Victim:
    """A port elsewhere that keeps what it gets."""

    def __init__(self) -> None:
        self._socket = socket.create_server((ELSEWHERE, 0))
        self.port = int(self._socket.getsockname()[1])
        self.got = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.got += 1
            connection.close()

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def victim() -> Iterator[Victim]:
    made = Victim()
    yield made
    made.end()


@contextmanager
def reporting(coordinator: str, host: str, port: int, tls: TlsFiles | None = None) -> Iterator[str]:
    """A process that reports a loaded pull of "m", with requests at this host; yields its id."""
    pull_id, end = str(uuid.uuid4()), threading.Event()
    report = pb.PullProgress(
        pull_id=pull_id,
        model={"name": "m", "revision": "main", "variant": "checkpoint"},
        host="honest",
        phase=pb.PullProgress.PHASE_COMPLETE,
        layers=1,
        ready=b"\x01",
        requests_port=port,
        requests_host=host,
    )

    def messages() -> Iterator[pb.ProgressRequest]:
        while True:
            yield pb.ProgressRequest(pull=report)
            if end.wait(1.0):
                return

    with dialled(coordinator, tls) as channel:
        stub = blocking_stub(channel, pb.DESCRIPTOR.services_by_name["Coordinator"])
        call = stub.Progress.future(messages(), metadata=(("mx-versions", own().encode()),))
        try:
            yield pull_id
        finally:
            end.set()
            call.cancel()


def dialled(coordinator: str, tls: TlsFiles | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(coordinator)
    certificate, key, authority = read_tls(tls)
    return grpc.secure_channel(
        coordinator, grpc.ssl_channel_credentials(authority, key, certificate)
    )


def requests_of(router: mx.Router, replica_id: str) -> str:
    found = {each.replica_id: each for each in router.replicas("m")}
    return found[replica_id].requests


@pytest.mark.parametrize("host", [ELSEWHERE, "10.9.8.7", "victim.example", "::1"])
def test_a_report_names_no_other_host(coordinator: str, host: str) -> None:
    with mx.Router(coordinator) as router, reporting(coordinator, host, 8000) as pull_id:
        until(lambda: any(r.replica_id == pull_id for r in router.replicas("m")), "report")
        assert requests_of(router, pull_id) in ("", "127.0.0.1:8000")


@pytest.mark.parametrize(
    ("host", "told"),
    [("localhost", "localhost:8000"), ("victim.example", "127.0.0.1:8000")],
)
def test_a_report_names_a_host_that_its_certificate_names(
    tmp_path: Path, host: str, told: str
) -> None:
    tls, _ = certificates(tmp_path)  # names localhost
    files = (tls.certificate, tls.key, tls.authority)
    settings = config.load(dict(zip(("tls_cert", "tls_key", "tls_ca"), files, strict=True)))
    with (
        daemon(tls=files) as (_, coordinator),
        mx.Router(coordinator, settings=settings) as router,
        reporting(coordinator, host, 8000, tls) as pull_id,
    ):
        until(lambda: any(r.replica_id == pull_id for r in router.replicas("m")), "report")
        assert requests_of(router, pull_id) == told


def test_a_prompt_does_not_reach_a_host_that_a_report_names(
    coordinator: str, victim: Victim
) -> None:
    router = Router("m", "--coordinator", coordinator)
    try:
        with reporting(coordinator, ELSEWHERE, victim.port):
            router.until(router.replicas, "replica")
            status, _ = router.ask("POST", "/generate", PROMPT)
            assert status == 503 and victim.got == 0
    finally:
        router.end()


def test_a_source_whose_endpoint_is_elsewhere_takes_no_requests(
    coordinator: str, checkpoint: Path, settings: config.Settings
) -> None:
    elsewhere = replace(settings, advertise=f"{ELSEWHERE}:0")
    with (
        mx.Router(coordinator) as router,
        api.serve(checkpoint, model="m", coordinator=coordinator, settings=elsewhere) as lying,
        api.serve(checkpoint, model="m", coordinator=coordinator) as honest,
    ):
        lying.accept_requests(8000)
        honest.accept_requests(8001)

        def told() -> list[str]:
            return [each.requests for each in router.replicas("m") if each.requests]

        until(lambda: "127.0.0.1:8001" in told(), "port of the honest source")
        assert told() == ["127.0.0.1:8001"]


def test_a_router_uses_no_replica_that_its_allow_list_leaves_out(
    coordinator: str, checkpoint: Path
) -> None:
    with api.serve(checkpoint, model="m", coordinator=coordinator) as source:
        source.accept_requests(8000)
        for allow, allowed in ((["10.0.0.0/8", "honest"], False), (["127.0.0.0/8"], True)):
            with mx.Router(coordinator, allow=allow) as router, router.watch("m") as watch:
                for event in watch:
                    if event.kind is mx.EventKind.SYNCED:
                        break
                for (replica,) in (router.replicas("m"), watch.replicas):
                    assert replica.allowed is allowed
                    assert allowed or not replica.requests
                estimate = router.estimate("m", attach=False)
                assert (estimate.seconds_to_ready is not None) is allowed
                assert bool(estimate.paths) is allowed
