"""Where a cache's socket may be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mx import config
from mx.errors import ConfigError, NotAllowedError
from mx.fleet.caching import cache
from mx.wire.private import cache_socket, check_folder, default_folder, make_folder, socket_in_use


def test_a_new_folder_is_the_users_alone(tmp_path: Path) -> None:
    there = tmp_path / "mine" / "cache.sock"
    assert socket_in_use(str(there)) == ""
    make_folder(there)
    assert there.parent.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        assert socket_in_use(str(there)) == str(there)
    assert socket_in_use("off") == ""


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    there = tmp_path / "cache.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        with pytest.raises(NotAllowedError, match="other users"):
            socket_in_use(str(there))
    with pytest.raises(NotAllowedError, match="other users"):
        make_folder(there)


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NotAllowedError):
        check_folder(tmp_path / "link" / "cache.sock")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    with pytest.raises(NotAllowedError, match="longer than"):
        make_folder(folder / "cache.sock")


def test_the_users_own_folder() -> None:
    assert cache_socket("auto").parent == default_folder()
    assert default_folder().name in ("mx", f"mx-{os.geteuid()}")


@pytest.mark.parametrize("value", ["relative/cache.sock", "", "on", 3])
def test_the_setting_is_checked(value: object) -> None:
    with pytest.raises(ConfigError, match="auto, off, or the path"):
        config.load({"cache_socket": value}, environ={"HOME": "/nonexistent"})


def test_a_folder_that_is_anothers_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(NotAllowedError, match="can't be used: Permission denied"):
        socket_in_use(str(tmp_path / "cache.sock"))


@pytest.mark.parametrize("kind", ["file", "folder", "lock"])
def test_what_is_no_socket_stays(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o700)
    there = tmp_path / "precious"
    if kind == "file":
        there.write_bytes(b"data")
    else:
        (there if kind == "folder" else tmp_path / "precious.lock").mkdir()
    settings = config.load({"cache_socket": str(there)}, environ={"HOME": "/nonexistent"})
    with pytest.raises(ConfigError, match="is not a socket|can't be opened"):
        cache(memory="1GB", settings=settings)
    assert kind == "lock" or there.exists()
