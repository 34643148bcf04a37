"""Key files: which are believed, how they are made, and what is done where none can be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mx import config, keyfile, namekey, publickey
from mx.coordinator import daemon
from mx.coordinator.state import shared_state
from mx.core.ownership import (
    MAC_BYTES,
    MAX_RECEIPT_BYTES,
    Purpose,
    Receipt,
    proof,
    statement,
)
from mx.core.types import ModelKey
from mx.errors import ConfigError
from mx.redis_state.shared import REDIS
from tests.support.daemon import ROOT
from tests.support.owners import commitment_of
from tests.support.records import make_documents, make_record

KEY = bytes(range(32))
NOBODY = 65_534


def plain(path: Path, data: bytes = KEY, mode: int = 0o600) -> None:
    path.write_bytes(data)
    path.chmod(mode)


def link(path: Path) -> None:
    plain(path.with_name("target"))
    path.symlink_to("target")


def others(path: Path) -> None:
    plain(path)
    os.chown(path, NOBODY, NOBODY)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "is a link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "is a link"),
    "folder": (Path.mkdir, "is not a file"),
    "fifo": (os.mkfifo, "is not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a link"),
    "0644": (lambda path: plain(path, mode=0o644), "its mode is 0644"),
    "0620": (lambda path: plain(path, mode=0o620), "its mode is 0620"),
    "empty": (lambda path: plain(path, b""), "has 0 bytes"),
    "truncated": (lambda path: plain(path, KEY[:31]), "has 31 bytes"),
    "longer": (lambda path: plain(path, KEY + b"\n"), "has 33 bytes"),
    "unreadable": (lambda path: plain(path, mode=0o644), "mode"),
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize("kind", [*WRONG, pytest.param("other owner", marks=needs_root)])
@pytest.mark.parametrize("named", ["", "flag --name-key"])
def test_a_file_that_others_may_have_made_or_read_is_refused(
    tmp_path: Path, kind: str, named: str
) -> None:
    make, said = (others, "belongs to user 65534") if kind == "other owner" else WRONG[kind]
    path = tmp_path / "name.key"
    make(path)
    with pytest.raises(ConfigError, match=said) as caught:
        keyfile.kept(path, named=named)
    assert caught.value.message.startswith(named) and str(path) in caught.value.message
    assert caught.value.hint


def test_a_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "mx" / "name.key"
    before = os.umask(0)
    try:
        key, why = keyfile.kept(path)
    finally:
        os.umask(before)
    assert len(key) == 32 and not why
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_nlink == 1 and os.listdir(path.parent) == ["name.key"]
    assert keyfile.kept(path) == (key, "") == (path.read_bytes(), "")
    with pytest.raises(FileExistsError):
        keyfile.make(path)
    assert path.read_bytes() == key and os.listdir(path.parent) == ["name.key"]


def test_processes_that_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mx import keyfile\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(keyfile.read_or_make(Path(sys.argv[1])).hex())"
    )
    path = tmp_path / "mx" / "name.key"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(6)
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        keys = {process.communicate(timeout=50)[0].strip() for process in started}
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert keys == {path.read_bytes().hex()}
    assert os.listdir(path.parent) == ["name.key"]


def test_a_named_file_that_is_missing_is_made_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name may be misspelt, and then its key owns none of the user's names."""
    named, default = tmp_path / "misspelt.key", tmp_path / "default.key"
    with caplog.at_level("INFO", "mx.keyfile"):
        keyfile.kept(default)
        first, _ = keyfile.kept(named, named="flag --name-key")
        assert keyfile.kept(named, named="flag --name-key") == (first, "")
    (said,) = caplog.messages
    assert str(named) in said and "--name-key" in said


def test_where_none_can_be_kept_it_is_random_and_said_unless_the_user_named_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "mx" / "name.key"  # its folder can't be made, not even by root
    first, why = keyfile.kept(path)
    second, _ = keyfile.kept(path)
    assert first != second and str(path) in why
    with pytest.raises(ConfigError, match="environment X: .*can't be kept"):
        keyfile.kept(path, named="environment X")


@needs_root
def test_no_key_is_kept_in_another_users_home(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with sudo, which may leave HOME as it is."""
    os.chown(tmp_path, NOBODY, NOBODY)
    settings = config.load(environ={"HOME": str(tmp_path)})
    first, second = namekey.load(settings), namekey.load(settings)
    assert first.commitment("m") == second.commitment("m")  # of this process
    assert os.listdir(tmp_path) == []
    assert "belongs to user 65534" in caplog.text and "`name_key`" in caplog.text


@needs_root
@pytest.mark.parametrize("state", ["home", "XDG_STATE_HOME"])
def test_nor_in_a_folder_of_this_users_in_another_users_home(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """Such as one that an earlier command has made there."""
    home = tmp_path / "home"
    folder = home / ".local" / "state" / "mx"
    folder.mkdir(parents=True)
    os.chown(home if state == "home" else folder.parent, NOBODY, NOBODY)
    environ = {"HOME": str(home)}
    if state != "home":
        environ["XDG_STATE_HOME"] = str(folder.parent)
    settings = config.load(environ=environ)
    namekey.load(settings)
    key, why = keyfile.kept(Path(settings.receipt_key))
    assert os.listdir(folder) == [] and len(key) == 32
    assert "belongs to user 65534" in caplog.text and "belongs to user 65534" in why


@needs_root
def test_keygen_makes_none_in_another_users_home(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    made = mx_command("keygen", HOME=str(tmp_path))
    assert made.returncode == 2 and "belongs to user 65534" in made.stderr
    assert os.listdir(tmp_path) == []
    file = tmp_path / "there.key"  # the user says so
    assert mx_command("keygen", str(file), HOME=str(tmp_path)).returncode == 0
    assert len(file.read_bytes()) == 32
    again = mx_command("keygen", str(file), HOME=str(tmp_path))
    assert again.returncode == 2 and "name another FILE" in again.stderr


def mx_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mx", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_setting_that_names_no_file_is_not_called_a_missing_home(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    namekey.load(config.load(environ={"HOME": str(tmp_path)}, flags={"name_key": ""}))
    assert "`name_key` names no file" in caplog.text and os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="NUL"):
        config.load(environ={}, flags={"name_key": "a\0b"})


def test_the_key_is_in_the_state_folder_or_where_the_user_says(tmp_path: Path) -> None:
    state, home = tmp_path / "state", tmp_path / "home"
    home.mkdir()
    for environ, file in (
        ({"HOME": str(home)}, home / ".local/state/mx/name.key"),
        ({"HOME": str(home), "XDG_STATE_HOME": str(state)}, state / "mx/name.key"),
        ({"HOME": str(home), "XDG_STATE_HOME": "relative"}, home / ".local/state/mx/name.key"),
        ({"HOME": str(home), "MX_PEER_NAME_KEY": str(tmp_path / "k")}, tmp_path / "k"),
    ):
        key = namekey.load(config.load(environ=environ))
        assert namekey.NameKey(file.read_bytes()).commitment("m") == key.commitment("m")


def test_pairs_of_names_are_unlike_and_those_of_one_key_the_same() -> None:
    one, again, other = (namekey.NameKey(material) for material in (KEY, KEY, KEY[::-1]))
    assert one.commitment("a") == again.commitment("a")
    assert len({k.commitment(n) for k in (one, other) for n in ("a", "b", "ab")}) == 6
    assert KEY.hex() not in repr(one) and repr(KEY) not in repr(one)
    signed = one.sign("a", b"text")
    assert publickey.is_signed(one.commitment("a"), signed, b"text")
    for commitment, signature, text in (
        (one.commitment("b"), signed, b"text"),
        (one.commitment("a"), signed, b"texts"),
        (one.commitment("a"), signed[:-1], b"text"),
        (one.commitment("a"), b"", b"text"),
        (b"\xff" * 32, signed, b"text"),
        (b"", signed, b"text"),
    ):
        assert not publickey.is_signed(commitment, signature, text)


def test_only_the_same_key_vouches_and_only_for_what_it_signed() -> None:
    from dataclasses import replace

    key, record = namekey.NameKey(KEY), make_record(make_documents("A"), variant="tp=0/2")
    commitment = key.commitment("llama")
    signed = key.sign("llama", statement(record.model, record.ref.identity))
    vouched = replace(record, commitment=commitment, statement=signed)
    assert key.vouched(vouched) and not namekey.NameKey(KEY[::-1]).vouched(vouched)
    other = make_record(make_documents("B"), variant="tp=0/2")
    model = record.model
    for wrong in (
        replace(vouched, ref=other.ref),
        replace(vouched, model=model._replace(variant="tp=1/2")),
        replace(vouched, model=model._replace(name="other")),
        replace(vouched, commitment=commitment_of(b"other")),
        replace(vouched, statement=b""),
        record,
    ):
        assert not key.vouched(wrong)
    # Whatever the revision: an update may bring earlier weights back.
    assert key.vouched(replace(vouched, model=model._replace(revision="main.2")))


def test_texts_that_are_signed_differ_wherever_anything_does() -> None:
    key = ModelKey("ab", "c", "d")
    args = (key, b"i" * 32, "source", "host:1", b"s" * 32, b"nonce")
    texts = {
        proof(Purpose.REGISTER, *args),
        proof(Purpose.UPDATE, *args),
        proof(Purpose.REGISTER, ModelKey("a", "bc", "d"), *args[1:]),
        proof(Purpose.REGISTER, ModelKey("ab", "cd", ""), *args[1:]),
        proof(Purpose.REGISTER, *args[:3], "host:2", *args[4:]),
        proof(Purpose.REGISTER, *args[:2], "sourceh", "ost:1", *args[4:]),
        proof(Purpose.REGISTER, *args[:4], b"n" * 32, b"nonce"),
        proof(Purpose.REGISTER, *args[:5], b"nonces"),
        statement(key, b"i" * 32),
        statement(ModelKey("a", "c", "bd"), b"i" * 32),
    }
    assert len(texts) == 10


def test_a_receipt_with_the_longest_names_is_accepted_by_who_gets_it() -> None:
    longest = "\U0001f999" * 256
    key = ModelKey(longest, longest, longest)
    receipt = Receipt(key, b"i" * 32, b"c" * 32, longest, 2**64, 1e300 / 3)
    assert len(receipt.encode()) + MAC_BYTES <= MAX_RECEIPT_BYTES
    assert Receipt.decode(receipt.encode()) == receipt


def test_receipts_are_read_as_they_were_written() -> None:
    receipt = Receipt(
        ModelKey('n"\U0001f999', "main.2", "tp=0/2"), b"i" * 32, b"c" * 32, "main", 2, 1.5
    )
    assert Receipt.decode(receipt.encode()) == receipt
    for data in (b"", b"{}", b"[]", b"[1,2,3]", b"\xff", b"[" * 9999):
        with pytest.raises(ConfigError):
            Receipt.decode(data)


def test_a_coordinators_receipts_are_its_hosts_unless_the_user_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts may share a home; a file that is named may move to another host."""
    path, found = str(tmp_path / "receipt.key"), {}
    for host in ("one", "two", ""):
        machine_id = tmp_path / f"machine-id-{host}"
        if host:
            machine_id.write_text(f"{host}\n")
        monkeypatch.setattr(daemon, "_MACHINE_ID", machine_id, raising=False)
        for named in ("", "--receipt-key"):
            key = daemon.receipt_key_of(path, named, "127.0.0.1:7600")
            assert key == daemon.receipt_key_of(path, named, "127.0.0.1:7600")
            assert key != daemon.receipt_key_of(path, named, "127.0.0.1:7601")
            found[host, named] = key
    assert len({key for (_, named), key in found.items() if named}) == 1
    assert len({*found.values()}) == 4


def test_coordinators_of_one_state_believe_each_other_and_no_others() -> None:
    shared = REDIS.shared_by("redis://10.0.0.9:6379/0")
    assert shared == REDIS.shared_by("rediss://user:secret@other.example:6379/")
    assert "secret" not in shared
    others = ["redis://10.0.0.9:6379/1", "redis://10.0.0.9:6379/0?prefix=staging"]
    assert len({shared, *map(REDIS.shared_by, others)}) == 3
    assert REDIS.shared_by("redis://[::1") == ""
    for alone in ("memory", "sqlite:/var/lib/mx/state.db"):
        assert shared_state(alone) is None
