"""Who a connection is, over time: certificates that expire, are renewed, and are revoked under
what runs."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from mx.core.types import Registration
from mx.errors import CoordinatorError, NotAllowedError
from mx.transport import TlsFiles
from mx.wire.client import CoordinatorClient
from tests.support.policy_site import (
    MEMBERS,
    MODEL,
    Site,
    authority,
    flags,
    registrable,
    site,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]

__all__ = ["authority", "site"]  # fixtures


def _until(found: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def _expiring(site: Site, name: str, for_s: float) -> TlsFiles:
    files = site.authority.certificate(name, MEMBERS[name])
    site.authority.postpone(files, -5, for_s=5 + for_s)
    return files


async def test_a_connection_is_served_no_longer_than_its_certificate_is_valid(site: Site) -> None:
    await asyncio.to_thread(site.coordinator, "--lease-s", "300")
    expiring = await asyncio.to_thread(_expiring, site, "source", 12)
    ends_s = time.monotonic() + 12
    client = CoordinatorClient(site.address, tls=expiring)
    documents, record, secret = registrable()
    try:
        await client.register(Registration(record, secret), documents)
        async with aclosing(client.watch(MODEL)) as updates:
            await anext(updates)
            await client.list_models()
            with pytest.raises(CoordinatorError):
                async for _ in updates:
                    pass
            assert time.monotonic() > ends_s - 2
            with pytest.raises(NotAllowedError, match="your certificate, .* has expired"):
                await client.list_models()
            # As soon as it has another one it goes on.
            await asyncio.to_thread(site.authority.postpone, expiring, -5)
            (status,) = await client.list_sources(MODEL)
            assert status.record.source_id == record.source_id
    finally:
        await client.close()


def _used(site: Site, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, TlsFiles]:
    """Files of these members, which the commands of the site use."""
    files = {name: site.files(name) for name in names}
    monkeypatch.setattr(site, "files", files.__getitem__)
    return files


@pytest.mark.long
@pytest.mark.parametrize("coordinated, reader", [("auto", "reader"), ("always", "holder")])
def test_what_runs_goes_on_with_renewed_certificates_and_no_lease_is_lost(
    site: Site,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    coordinated: str,
    reader: str,
) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(f"coordinated_reading = '{coordinated}'")
    files = _used(site, monkeypatch, "coordinator", "source", reader)
    coordinator = site.coordinator("--lease-s", "1")
    for name in ("source", reader):
        site.authority.postpone(files[name], -5, for_s=5 + 12)
    ends_s = time.monotonic() + 12
    source, _ = site.serve(
        checkpoint, "--max-bandwidth", "1MB", "--log-level", "debug", "--config", str(settings)
    )
    out = tmp_path / "pulled"
    pull = site.mx(
        reader,
        "pull",
        MODEL,
        "--transport",
        "tcp",
        "--out",
        str(out),
        "--json",
        "--config",
        str(settings),
    )
    source.until(lambda: "reader.granted" in source.err, "a reader")
    for name in ("source", reader):
        site.authority.postpone(files[name], -5)
    source.until(lambda: "reader.moved" in source.err, "the reader on another connection")
    assert time.monotonic() < ends_s
    while time.monotonic() < ends_s + 3:
        assert pull.process.poll() is None, pull.err
        time.sleep(0.1)
    assert "reader.ended" not in source.err and "reader.expired" not in source.err
    assert pull.wait(90) == 0, pull.err
    assert pull.json()["retries"] == 0
    assert source.err.count("reader.granted") == 1
    assert "source.unregistered" not in source.err
    assert "lease expired" not in coordinator.err


@pytest.mark.long
def test_what_is_not_renewed_ends(
    site: Site, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _used(site, monkeypatch, "coordinator", "source", "reader", "second")
    coordinator = site.coordinator("--lease-s", "1")
    source, endpoint = site.serve(checkpoint, "--max-bandwidth", "1MB")
    site.authority.postpone(files["reader"], -5, for_s=5 + 12)
    pull = site.mx("reader", "pull", MODEL, "--transport", "tcp", "--out", str(tmp_path / "out"))
    source.until(lambda: "reader.granted" in source.err, "a reader")
    source.until(lambda: "reader.ended" in source.err, "the end of its grant")
    assert pull.wait(60) == 5, pull.err
    assert "your certificate" in pull.err and "has expired" in pull.err
    assert not (tmp_path / "out" / "model.safetensors").exists()

    # A source whose certificate ends is not listed any more, and its readers know why.
    source.end()
    site.authority.postpone(files["source"], -5, for_s=5 + 12)
    source, endpoint = site.serve(checkpoint)
    gone = f"source.gone model={MODEL}.*endpoint={re.escape(endpoint)}.*reason=.lease expired"
    _until(lambda: re.search(gone, coordinator.err) is not None, coordinator.err)
    assert "has expired" in source.err


@pytest.mark.long
def test_a_revoked_certificate_ends_at_once(
    site: Site, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _used(site, monkeypatch, "coordinator", "source", "reader", "second")
    crl = tmp_path / "revoked.pem"
    given = (*flags(files["coordinator"]), "--tls-crl", str(crl))
    missing = site.run("--listen", site.address, *given, daemon=True)
    assert missing.wait(60) == 2 and "tls_crl" in missing.err.replace("-", "_")
    site.authority.revoke(crl, for_s=-5)
    late = site.run(
        "--listen", site.address, *flags(files["coordinator"]), "--tls-crl", str(crl), daemon=True
    )
    assert late.wait(60) == 2 and "was to be replaced" in late.err and "Traceback" not in late.err
    site.authority.revoke(crl)
    coordinator = site.coordinator("--tls-crl", str(crl), "--lease-s", "1")
    source, endpoint = site.serve(checkpoint, "--max-bandwidth", "1MB", "--tls-crl", str(crl))
    pull = site.mx("reader", "pull", MODEL, "--transport", "tcp", "--out", str(tmp_path / "out"))
    source.until(lambda: "reader.granted" in source.err, "a reader")

    crl.write_text("oh")  # what held before holds
    source.until(lambda: "revocations.bad" in source.err, "a warning")
    site.authority.revoke(crl, files["second"], for_s=-5)
    source.until(lambda: source.err.count("revocations.bad") == 2, "another warning")
    assert pull.process.poll() is None, pull.err
    site.authority.revoke(crl, files["reader"])
    assert pull.wait(60) == 5, pull.err
    assert "is revoked" in pull.err
    source.until(lambda: '"revocations"' in source.err, "its audit line")
    coordinator.until(lambda: '"revocations"' in coordinator.err, "the coordinator's")
    said = site.refused("reader", "models")
    assert "your certificate" in said and "is revoked" in said
    listing = site.mx("second", "models")
    assert listing.wait(60) == 0, listing.err
    assert endpoint and "source.gone" not in coordinator.err


@pytest.mark.long
def test_connections_have_a_largest_age(
    site: Site, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _used(site, monkeypatch, "coordinator", "source", "reader")
    coordinator = site.coordinator("--lease-s", "1", "--connection-age", "20s")
    aged = ("--connection-age", "20s", "--log-level", "debug")
    source, _ = site.serve(checkpoint, "--max-bandwidth", "1MB", *aged)
    out = tmp_path / "pulled"
    pull = site.mx("reader", "pull", MODEL, "--transport", "tcp", "--out", str(out), "--json")
    assert pull.wait(120) == 0, pull.err
    assert pull.json()["retries"] == 0 and pull.json()["seconds"] > 25
    assert "reader.moved" in source.err and source.err.count("reader.granted") == 1
    moved = re.findall(r"reader.moved .*peer=(\S+)", source.err)
    assert len(set(moved)) == len(moved)  # each time on a new connection
    assert "source.unregistered" not in source.err
    assert "lease expired" not in coordinator.err
