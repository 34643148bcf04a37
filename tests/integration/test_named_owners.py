"""Pulls that name an owner's key: what coordinators, relays and strangers can make of a name."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mx import api
from mx.core.types import ModelKey
from mx.core.vouching import decode
from mx.errors import CoordinatorError
from mx.fetching import owners
from mx.namekey import NameKey
from mx.publickey import PublicKey, is_signed
from mx.storage import folder_index
from tests.integration.owners import User, user
from tests.support.clients import client_of
from tests.support.commands import Command, Run, environment, free_port, start_coordinator
from tests.support.outcomes import until
from tests.support.redis_server import RedisServer, needs_redis

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

OWNER, OTHER = NameKey(b"o" * 32), NameKey(b"x" * 32)
KEY = str(PublicKey(OWNER.owner))
SERVES = "source = mx.serve(tensors({seed}), model='{name}', embed=False{more})"
SMALL_ORDER = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"


def keyed(folder: Path, key: NameKey) -> Path:
    """A user's state folder with this key."""
    path = folder / "mx"
    path.mkdir(parents=True, exist_ok=True)
    (path / "name.key").write_bytes(key._material)
    (path / "name.key").chmod(0o600)
    return folder


class Site:
    """A coordinator, which may lie, and users. Pulls are of a user who owns nothing."""

    def __init__(self, run: Run, folder: Path, stack: ExitStack) -> None:
        self.run, self.folder, self.stack = run, folder, stack
        self.reader = folder / "reader"
        self.lies = folder / "lies.json"
        self.identities: dict[int, str] = {}  # by seed

    def begin(self, *arguments: str) -> None:
        self.address, self.daemon = start_coordinator(self.run, *arguments)
        self._arguments = arguments

    def begin_to_lie(self) -> None:
        """Have a coordinator that does what `lie` says."""
        port = free_port()
        liar = _Liar(str(self.lies), str(port))
        self.stack.callback(liar.end)
        self.address = f"127.0.0.1:{port}"
        liar.until(self._answers, "coordinator")

    def _answers(self) -> bool:
        try:
            api.list_models(coordinator=self.address)
        except CoordinatorError:
            return False
        return True

    def lie(self, **said: Any) -> None:
        self.lies.write_text(json.dumps(said))

    def restart(self) -> None:
        port = int(self.address.rpartition(":")[2])
        self.daemon.end()
        self.daemon = start_coordinator(self.run, *self._arguments, port=port)[1]

    def user(self, key: NameKey = OWNER) -> User:
        name = f"user{len(os.listdir(self.folder))}"
        return self.stack.enter_context(user(self.address, keyed(self.folder / name, key)))

    def serves(self, seed: int, name: str = "m", more: str = "", key: NameKey = OWNER) -> User:
        served = self.user(key)
        served.must(SERVES.format(seed=seed, name=name, more=more))
        self.identities[seed] = served.does("source.identity_hex").strip("'")
        return served

    def pull(self, model: str = "m", *more: str, owner: str = KEY, **env: str) -> Command:
        """`mx pull`, which has ended."""
        asked = ("--owner", owner) if owner else ()
        command = self.run(
            "pull", model, *asked, "--coordinator", self.address, "--json", *more,
            env=environment(XDG_STATE_HOME=str(self.reader), **env),
        )  # fmt: skip
        command.wait()
        return command

    def gets(self, seed: int, model: str = "m", *more: str, owner: str = KEY) -> None:
        """A pull that names the owner gets these weights."""
        pulled = self.pull(model, *more, owner=owner)
        assert pulled.wait() == 0, pulled.err
        assert pulled.json()["identity"] == self.identities[seed]

    def refused(self, why: str, model: str = "m", *more: str, owner: str = KEY) -> None:
        """It ends with exit code 4, and gets without an owner what is answered."""
        pulled = self.pull(model, *more, owner=owner)
        assert (pulled.wait(), why in pulled.err + pulled.out) == (4, True), pulled.err
        unasked = self.pull(model, *more, owner="")
        assert unasked.wait() == 0, unasked.err

    def resolved(self, name: str = "m", revision: str = "", variant: str = "") -> Any:
        async def ask() -> Any:
            async with client_of(self.address) as client:
                return await client.resolve(name, revision, variant)

        return asyncio.run(ask())

    @property
    def seen(self) -> Path:
        """What the reader has seen of the name."""
        (file,) = (self.reader / "mx").glob("owner-*")
        return file


class _Liar(Command):
    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-m", "tests.integration.lying_coordinator"]


@pytest.fixture
def site(run: Run, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(run, tmp_path, stack)


# -- honest ----------------------------------------------------------------------------------------


def changed(owner: User, site: Site, seed: int) -> None:
    """Have an owner who lends its memory publish other weights."""
    owner.must(f"with source.changing(): write(lent, {seed})")
    site.identities[seed] = owner.does("source.identity_hex").strip("'")


LENDS = "lent = tensors(1); source = mx.serve(lent, model='m', copy=False, embed=False)"


def lender(site: Site) -> User:
    owner = site.user()
    owner.must(LENDS)
    site.identities[1] = owner.does("source.identity_hex").strip("'")
    return owner


def test_a_name_is_its_owners_through_updates(site: Site, tmp_path: Path) -> None:
    site.begin()
    owner = lender(site)
    site.gets(1)
    assert stat.S_IMODE(site.seen.stat().st_mode) == 0o600
    before = site.seen.read_text()
    changed(owner, site, 2)
    site.gets(2)
    assert site.seen.read_text() > before
    changed(owner, site, 1)  # back on purpose
    site.gets(1)
    site.gets(1, f"m@{site.identities[1]}")
    site.refused("the owner that was asked for has not signed", owner=str(PublicKey(OTHER.owner)))
    other = site.pull("m", owner="ed25519:" + "0" * 64)
    assert other.wait() == 2 and "placeholder" in other.err
    site.gets(1, owner=str(PublicKey(OWNER.commitment("m"))))
    # A process of the owner's that starts with what is old makes it look no newer.
    pulled = site.resolved(revision="main.2").vouch
    again = site.serves(2, more=", revision='main.2'")
    assert again.does("source.model.revision") == "'main.2'"
    assert site.resolved(revision="main.2").vouch == pulled
    site.gets(2, "m:main.2")
    site.gets(1)
    # The trust file names its owner, too.
    trust = tmp_path / "trust.toml"
    for key, code in ((KEY, 0), (str(PublicKey(OTHER.owner)), 4)):
        trust.write_text(f"[[names]]\nname = 'm*'\nkey = '{key}'\n")
        assert site.pull("m", owner="", MX_PEER_TRUST=str(trust)).wait() == code
    trust.write_text("[[names]]\nname = 'other'\nkey = '" + KEY + "'\n")
    assert site.pull("m", owner="", MX_PEER_TRUST=str(trust)).wait() == 0
    trust.write_text("[[names]]\nname = 'm'\nkey = 'ed25519:00'\n")
    assert site.pull("m", owner="", MX_PEER_TRUST=str(trust)).wait() == 2


@pytest.mark.parametrize("left", ["owner", "relay"])
def test_after_a_restart_of_a_coordinator_that_keeps_nothing(site: Site, left: str) -> None:
    site.begin()
    owner = lender(site)
    changed(owner, site, 2)
    if left == "relay":
        relay = site.run("pull", "m", "--coordinator", site.address, "--hold")
        relay.until(lambda: "serving m" in relay.err, "the relay")
        owner.kill()
    vouch = site.resolved().vouch
    site.restart()
    until(lambda: api.list_sources("m", coordinator=site.address), "a source")
    assert site.resolved().vouch == vouch
    site.gets(2)


@pytest.mark.parametrize("state", ["sqlite", pytest.param("redis", marks=needs_redis)])
def test_states_that_outlive_coordinators_keep_what_owners_say(
    site: Site, state: str, tmp_path: Path
) -> None:
    server = RedisServer()
    if state == "redis":
        server.start()
        site.stack.callback(server.close)
    site.begin("--state", server.url if state == "redis" else f"sqlite:{tmp_path / 'state'}")
    owner = site.serves(1)
    vouch = site.resolved().vouch
    owner.kill()
    site.restart()
    found = site.resolved()
    assert found.vouch == vouch
    assert decode(vouch, found.model, is_signed) is not None


# -- liars -----------------------------------------------------------------------------------------


def test_a_stranger_has_bound_the_name(site: Site) -> None:
    site.begin()
    site.serves(1, key=OTHER)
    site.refused("which the owner that was asked for has not signed")


def test_a_coordinator_answers_with_what_it_was_before(site: Site) -> None:
    site.begin_to_lie()
    owner = site.serves(1)
    site.gets(1)
    site.serves(2, more=", update=True")
    site.gets(2)
    site.lie(asks={"revision": "main"})
    site.refused("this user has seen what he has published")
    refused = site.pull("m")
    assert str(site.seen) in refused.err + refused.out
    site.gets(1, "m", "--allow-older")  # the user's own wish
    # The date is in the signature.
    old, new = site.resolved(revision="main").vouch, None
    site.lies.unlink()
    new = site.resolved().vouch
    site.lie(asks={"revision": "main"}, vouch=(new[:8] + old[8:]).hex())
    site.refused("no valid signature")
    site.lies.unlink()
    site.seen.unlink()
    site.lie(asks={"revision": "main"})
    site.gets(1)  # who has seen nothing can't know
    owner.kill()


def lies(site: Site, how: str) -> tuple[str, dict[str, Any]]:
    """Return what a pull says of a lie, and the lie."""
    mine = site.resolved()
    said = bytearray(mine.vouch)
    found = decode(bytes(said), ModelKey("m"), is_signed)
    assert found is not None
    none = "no valid signature"
    if how == "nothing":
        return "of which its owner says nothing", {"vouch": ""}
    if how == "another name":
        return none, {"asks": {"name": "n"}}
    if how == "another name, endorsed":
        forged = replace(found, identity=site.resolved("n").ref.identity)
        return none, {"asks": {"name": "n"}, "vouch": forged.encode().hex()}
    if how == "another variant":
        return none, {"asks": {"variant": "q"}}
    if how == "another revision":
        return none, {"asks": {"revision": "old"}}
    if how == "another owner":
        vouch = OTHER.vouch(ModelKey("m"), mine.ref, (), found.issued_us, updates=False)
        return "the owner that was asked for has not signed", {"vouch": vouch.hex()}
    if how == "another owner with this endorsement":
        ours = replace(found, commitment=OTHER.commitment("m"))
        forged = replace(
            ours, signature=OTHER.sign("m", replace(ours, signature=b"").text(ModelKey("m")))
        )
        return "the owner that was asked for has not signed", {"vouch": forged.encode().hex()}
    if how in ("zero", "small"):
        point = bytes(32) if how == "zero" else bytes.fromhex(SMALL_ORDER)
        weak = replace(found, commitment=point, signature=point + bytes(32))
        return none, {"vouch": weak.encode().hex()}
    if how == "longer":
        return none, {"vouch": (mine.vouch + bytes(1)).hex()}
    said[int(how)] ^= 1
    return none, {"vouch": said.hex()}


def test_coordinators_that_lie(site: Site, tmp_path: Path) -> None:
    site.begin_to_lie()
    site.serves(1)
    owner = site.serves(2, "n")
    owner.must("more = [mx.serve(tensors(3), model='m', variant='q', embed=False)]")
    owner.must("more += [mx.serve(tensors(4), model='m', revision='old', embed=False)]")
    site.gets(1)
    site.gets(2, "n")
    hows = (
        "nothing",
        "another name",
        "another name, endorsed",
        "another variant",
        "another revision",
        "another owner",
        "another owner with this endorsement",
        "zero",
        "small",
        "longer",
    )
    for how in hows:
        why, lie = lies(site, how)
        site.lie(**lie)
        site.refused(why)
        site.lies.unlink()
    # Of each field a bit: the date, the commitment, the identity, the endorsement, the signature.
    for how in ("6", "9", "41", "75", "139", "199"):
        why, lie = lies(site, how)
        site.lie(**lie)
        flipped = site.pull()
        assert (flipped.wait(), why in flipped.err) == (4, True)
        site.lies.unlink()
    site.gets(1)


def test_stores_and_peers_show_no_owner(site: Site, tmp_path: Path, checkpoint: Path) -> None:
    """What no owner has signed is not taken from anywhere."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(checkpoint)
    (folder / "config.json").write_text("{}")
    site.begin_to_lie()
    served = site.run(
        "serve", str(folder), "--model", "m", "--coordinator", site.address, "--json",
        "--name-key", str(keyed(tmp_path / "served", OWNER) / "mx" / "name.key"),
    )  # fmt: skip
    endpoint, site.identities[0] = served.json()["endpoint"], served.json()["identity"]
    site.gets(0, "m", "--out", str(tmp_path / "out"))
    site.gets(0, "m", "--from", f"peer={endpoint}")
    other = str(PublicKey(OTHER.owner))
    why = "the owner that was asked for has not signed"
    site.refused(why, "m", "--from", f"peer={endpoint}", owner=other)
    site.refused(why, "m", "--from", f"auto={folder}", owner=other)
    site.refused(why, "m", "--files-only", "--from", f"auto={folder}", owner=other)
    pinned = f"m@{site.identities[0]}"
    site.refused(why, pinned, owner=other)
    site.gets(0, pinned, "--from", f"disk={folder}", owner=other)
    by_path = site.pull("m", "--from", f"disk={folder}")
    assert by_path.wait() == 2 and "name the pin" in by_path.err + by_path.out
    others = tmp_path / "others"
    others.mkdir()
    (others / "model.safetensors").symlink_to(checkpoint)
    (others / "config.json").write_text("[]")
    site.run("serve", str(others), "--model", "n", "--coordinator", site.address, "--json").json()
    site.lie(files_of="n")
    site.refused("its owner has signed other files")
    site.lie(vouch="")
    site.refused("of which its owner says nothing", "m", "--from", f"auto={folder}")
    planned = site.run("plan", "m", "--owner", KEY, "--coordinator", site.address)
    assert planned.wait() == 4 and "its owner says nothing" in planned.err
    # A coordinator that ends leaves the disk alone.
    served.end()
    site.lies.unlink()
    site.address = f"127.0.0.1:{free_port()}"
    away = site.pull("m", "--from", f"auto={folder}")
    assert away.wait() != 0
    assert site.pull("m", "--from", f"auto={folder}", owner="").wait() == 0


def test_what_was_seen_is_kept_or_that_is_said(site: Site) -> None:
    site.begin()
    site.serves(1)
    site.gets(1)
    kept = site.seen.read_text()
    for damaged in ("", "1", "a,b,c", "1" * 200):
        site.seen.write_text(damaged)
        pulled = site.pull()
        assert pulled.wait() == 2 and str(site.seen) in pulled.err + pulled.out
    site.seen.write_text(kept)
    site.seen.chmod(0o644)
    assert site.pull().wait() == 5
    site.seen.chmod(0o600)
    site.gets(1)
    site.reader = Path("/proc/none")  # where nothing can be made
    unkept = site.pull()
    assert unkept.wait() == 0 and "is not remembered" in unkept.err


def test_processes_at_once_do_not_go_back(tmp_path: Path) -> None:
    folder, many, last = tmp_path / "mx", 8, 60
    script = (
        "import sys; from pathlib import Path\n"
        "from mx.fetching.owners import _OwnerStatement, _remembered\n"
        "for n in range(1, int(sys.argv[2])):\n"
        "    newest = _remembered(Path(sys.argv[1]), 'owner-x', _OwnerStatement(n, 'i', 'p'))\n"
        "    assert newest.issued_us >= n\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script, str(folder), str(last)], env=environment())
        for _ in range(many)
    ]
    assert [each.wait(120) for each in running] == [0] * many
    assert (folder / "owner-x").read_text() == f"{last - 1},i,p"
    assert sorted(os.listdir(folder)) == [".owner-x.lock", "owner-x"]


def test_a_process_that_stops_as_it_writes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "mx"
    monkeypatch.setattr(folder_index, "LOCK_S", 0.2)
    assert owners._remembered(folder, "owner-x", owners._OwnerStatement(1)).issued_us == 1
    fd = folder_index.opened(folder, make=False)
    try:
        with folder_index.locked(fd, "owner-x"):
            owners._say_forgotten.cache_clear()
            kept = owners._remembered(folder, "owner-x", owners._OwnerStatement(2))
    finally:
        os.close(fd)
    assert kept.issued_us == 1 and "is not remembered" in caplog.text
    assert owners._remembered(folder, "owner-x", owners._OwnerStatement(2)).issued_us == 2
