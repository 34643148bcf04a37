"""A policy that changes under what it allowed."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mx.core.policy import Policy, Right
from mx.errors import ClosedError, ConfigError, NotAllowedError, PeerUntrustedError
from mx.log import Event, set_up
from mx.transport import TlsFiles
from mx.wire import audit, principals
from mx.wire.audit import INTERVAL_S, MOST_KINDS, MOST_PRINCIPALS, AuditLog
from mx.wire.principals import Access
from tests.support.certificates import Authority
from tests.support.log_state import log_as_it_was

PULL = (Right.PULL,)
TLS = TlsFiles("cert.pem", "key.pem", "ca.pem")
ALLOWS = "[[allow]]\nprincipal = 'spiffe://a/b'\nmay = 'pull'\nmodels = 'llama*'\n"
OTHERS = ALLOWS.replace("a/b", "a/c")


class Context:
    """What gRPC shows of a call."""

    def __init__(self, *uris: str) -> None:
        self._uris = tuple(uri.encode() for uri in uris)

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5000"

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"x509_pem_cert": (b"",), "peer_uri": self._uris}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the audit lines."""
    found = [each.msg for each in caplog.records if each.name == "mx.audit"]
    return [dict(each.fields) for each in found if isinstance(each, Event)]


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.02)


async def test_a_new_policy_ends_what_it_does_not_allow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mx")
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    access = Access(str(path), TLS, error=PeerUntrustedError)
    changes: list[int] = []
    access.follow(lambda: changes.append(access.version))
    ended: list[Exception] = []

    async def hold(model: str) -> None:
        try:
            with access.standing(Context("spiffe://a/b"), PULL, model, pin="00"):
                await asyncio.sleep(3600)
        except PeerUntrustedError as error:
            ended.append(error)

    watching = asyncio.create_task(access.watch())
    holding = asyncio.create_task(hold("llama-8b"))
    try:
        await asyncio.sleep(0)
        for wrong in ("[[", "", ALLOWS.replace("pull", "fly")):
            path.write_text(wrong)
            bad = len([each for each in caplog.messages if "policy.bad" in each])
            await until(lambda bad=bad: sum("policy.bad" in m for m in caplog.messages) > bad)  # type: ignore[misc]
        assert not changes and not ended
        access.require(Context("spiffe://a/b"), PULL, "llama-8b")
        path.unlink()
        await until(lambda: sum("No such file" in m for m in caplog.messages) > 0)
        path.write_text(ALLOWS + "# the same\n")
        await until(lambda: changes == [1])
        assert not ended
        path.write_text(OTHERS)
        await until(lambda: bool(ended))
        assert "spiffe://a/b may not pull 'llama-8b'" in str(ended[0])
        assert not holding.cancelled() and changes == [1, 2]
        with pytest.raises(PeerUntrustedError):
            access.require(Context("spiffe://a/b"), PULL, "llama-8b")
        access.require(Context("spiffe://a/c"), PULL, "llama-8b")
        refused = [each for each in lines(caplog) if each["result"] == "refused"]
        assert {"principal": "spiffe://a/b", "model": "llama-8b", "pin": "00"}.items() <= (
            refused[0].items()
        )
        changes_of = [each["result"] for each in lines(caplog) if each["action"] == "policy"]
        assert changes_of == [*["bad"] * 4, "read", "read"]
    finally:
        for task in (watching, holding):
            task.cancel()
        await asyncio.gather(watching, holding, return_exceptions=True)


async def test_what_ends_otherwise_is_no_refusal(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    access = Access(str(path), TLS)

    async def hold() -> None:
        with access.standing(Context("spiffe://a/b"), PULL, "llama-8b"):
            await asyncio.sleep(3600)

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding


def test_who_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mx")
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    access = Access(str(path), TLS)
    for context, model, says in (
        (Context("spiffe://a/c"), "llama-8b", "may not pull 'llama-8b'"),
        (Context("spiffe://a/b"), "other", "may not pull 'other'"),
        (Context("spiffe://a/c"), None, "may not pull any model"),
        (Context("spiffe://a/b", "spiffe://a/c"), "llama-8b", "has 2 URIs"),
        (Context(), "llama-8b", "has no subjectAltName"),
        (Context("spiffe://a/b"), "llama" + "x" * (1 << 20), "may not pull 'llamax"),
    ):
        with pytest.raises(NotAllowedError, match=says) as error:
            access.require(context, PULL, model)
        assert len(error.value.message) < 1000
    caplog.clear()
    for _ in range(1000):  # a stranger fills no log
        with pytest.raises(NotAllowedError):
            access.require(Context("spiffe://a/d"), PULL, "llama-8b")
    assert len(caplog.messages) == 1 == len(lines(caplog))
    assert Access().allows(access.caller(Context("spiffe://a/c")), PULL, "any")


def _refused(access: Access, principal: str, model: str) -> None:
    with pytest.raises(NotAllowedError):
        access.require(Context(principal), PULL, model)


async def test_made_up_models_drive_no_other_refusal_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mx.audit")
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    access = Access(str(path), TLS)
    watching = asyncio.create_task(access.watch())
    await asyncio.sleep(0)
    for number in range(10_000):
        _refused(access, "spiffe://a/c", f"made-up-{number}")
    assert len(caplog.messages) <= MOST_KINDS + 1
    caplog.clear()
    for _ in range(3):
        _refused(access, "spiffe://a/d", "other")
    assert len(caplog.messages) == 1
    watching.cancel()  # which says what the timer would have said
    await asyncio.gather(watching, return_exceptions=True)
    counts = {(each["principal"], each["model"]): each["count"] for each in lines(caplog)[1:]}
    assert counts == {
        ("spiffe://a/c", ""): 10_000 - MOST_KINDS - 1,
        ("spiffe://a/d", "other"): 2,
    }


async def test_what_was_left_out_is_said_in_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "mx.audit")
    monkeypatch.setattr(audit, "INTERVAL_S", 0.5)
    monkeypatch.setattr(principals, "_LOOK_S", 0.05)
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    access = Access(str(path), TLS)
    watching = asyncio.create_task(access.watch())
    try:
        for _ in range(3):
            _refused(access, "spiffe://a/d", "other")
        await until(lambda: [each.get("count") for each in lines(caplog)] == [None, 2])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_principals_are_bounded_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mx.audit")
    log = AuditLog()

    def refuse(principal: str, at_s: float) -> None:
        log.write(principal, "::1", "pull", "refused", at_s, model="m", error="NotAllowedError")

    for number in range(3 * MOST_PRINCIPALS):
        refuse(str(number), 0.0)
    assert len(lines(caplog)) == MOST_PRINCIPALS + MOST_KINDS + 1
    log.flush(INTERVAL_S - 1)
    assert len(lines(caplog)) == MOST_PRINCIPALS + MOST_KINDS + 1
    caplog.clear()
    log.flush(INTERVAL_S)
    (others,) = lines(caplog)
    assert others["principal"] == "others" and others["address"] == ""
    assert others["count"] == 2 * MOST_PRINCIPALS - MOST_KINDS - 1
    caplog.clear()
    for at_s in (INTERVAL_S, INTERVAL_S, 2 * INTERVAL_S):  # before `flush` has said so
        refuse("late", at_s)
    assert [each.get("count") for each in lines(caplog)] == [None, 2]


def test_what_is_granted_is_a_json_line_and_equal_ones_are_merged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mx.audit")
    access = Access()
    for _ in range(1000):
        access.require(Context("spiffe://a/b"), PULL, "llama", revision="main", pin="ab")
    for number in range(1000):  # refusals that anybody can cause drive it out of no log
        access.audit.write("x", "y", "pull", "refused", model=str(number))
    access.require(Context("spiffe://a/b"), PULL, "llama", revision="main.2", pin="cd")
    access.audit.flush(time.monotonic() + 2 * INTERVAL_S)
    granted = [each for each in lines(caplog) if each["result"] == "granted"]
    common = {
        "principal": "spiffe://a/b",
        "address": "10.0.0.1",
        "action": "pull",
        "model": "llama",
        "result": "granted",
    }
    first, second = common | {"revision": "main", "pin": "ab"}, common | {"revision": "main.2"}
    assert granted == [first, second | {"pin": "cd"}, first | {"count": 999}]

    shown = StringIO()
    with log_as_it_was():
        set_up("info", "text", shown)  # of the audit log alone the lines are JSON
        access.granted(access.caller(Context("spiffe://a/c")), "pull", model="a\nb")
        logging.getLogger("mx.other").info("as ever")
    line, other = shown.getvalue().splitlines()
    said = json.loads(line)
    assert (said["event"], said["fields"]["model"]) == ("audit.granted", "a\nb")
    assert "mx.other: as ever" in other


def test_a_policy_needs_certificates(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    with pytest.raises(ConfigError, match="names certificates"):
        Access(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        Access(str(tmp_path / "none"), TLS)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        Access(str(path), TLS)
    path.write_text("#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        Access(str(path), TLS)


async def test_what_fails_unexpectedly_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "mx")
    path = tmp_path / "policy.toml"
    path.write_text(ALLOWS)
    access, parsed, fails = Access(str(path), TLS), principals._parsed, [True, True]

    def failing(data: bytes, where: str) -> Policy:
        if fails:
            fails.pop()
            raise RuntimeError("can't start new thread")
        return parsed(data, where)

    def broken() -> None:
        raise KeyError

    monkeypatch.setattr(principals, "_parsed", failing)
    told: list[int] = []
    access.follow(broken)
    access.follow(lambda: told.append(access.version))
    watching = asyncio.create_task(access.watch())
    try:
        path.write_text(OTHERS)
        await until(lambda: told == [1])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert not fails
    assert sum("files.unread" in each for each in caplog.messages) == 1
    access.require(Context("spiffe://a/c"), PULL, "llama-8b")


class Shown(Context):
    """A call on a connection that has shown a certificate."""

    def __init__(self, files: TlsFiles) -> None:
        super().__init__("spiffe://a/b")
        self._pem = Path(files.certificate).read_bytes()

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return super().auth_context() | {"x509_pem_cert": (self._pem,)}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize("how", ["expired", "revoked", "authority"])
async def test_a_stream_ends_with_its_connections_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    caplog.set_level(logging.INFO, "mx")
    monkeypatch.setattr(principals, "_LOOK_S", 0.05)
    ours, later = Authority(tmp_path, "ours"), Authority(tmp_path, "later")
    own, member, other = (ours.certificate(name) for name in ("own", "member", "other"))
    crl = tmp_path / "crl.pem"
    ours.revoke(crl)
    access = Access("", replace(own, revocations=str(crl)), error=PeerUntrustedError)
    before = Path(own.authority).read_bytes()
    access.trust(before, before)
    if how == "expired":
        ours.postpone(member, -5, for_s=7)
    call, stays, ended = Shown(member), Shown(other), list[Exception]()
    told: list[bool] = []

    async def hold() -> None:
        try:
            with access.standing(call, PULL, "llama"):
                told.append(access.ends_soon(call, time.monotonic()))
                await asyncio.sleep(3600)
        except PeerUntrustedError as error:
            ended.append(error)

    tasks = [asyncio.create_task(access.watch()), asyncio.create_task(hold())]
    try:
        await until(lambda: bool(told))
        assert told == [how == "expired"]
        access.check_connection(stays)
        if how == "revoked":
            ours.revoke(crl, member)
        elif how == "authority":
            access.trust(before, (tmp_path / "later.pem").read_bytes())
        await until(lambda: bool(ended))
        said = {"expired": "has expired", "revoked": "is revoked", "authority": "not trust"}[how]
        assert said in str(ended[0]) and access.version == 1
        with pytest.raises(ClosedError, match=said):
            access.check_connection(call)
        with pytest.raises(PeerUntrustedError, match=said):
            access.require(call, PULL, "llama")
        changes = {(each["action"], each["result"]) for each in lines(caplog)}
        assert {"revoked": ("revocations", "read"), "authority": ("certificates", "replaced")}.get(
            how, ("pull", "refused")
        ) in changes
        if how == "authority":
            access.check_connection(Shown(later.certificate("new")))
        else:
            access.check_connection(stays)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
