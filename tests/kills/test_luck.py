"""Bad luck with the state under load: it stands still, is cut off, full, or clocks are wrong.

No name is lost, doubled or taken, and the log says what is the matter.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kills.run import Coordinator, Counts, play_on
from tests.support.held_link import held_link
from tests.support.redis_server import needs_redis, redis_server

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

NAMES = 6


def check(counts: Counts, folder: Path, *said: str) -> None:
    assert not counts.wrong, counts.wrong
    for what in ("names checked", "updates", "heartbeats"):
        assert counts.did[what], what
    text = (folder / "log").read_text()
    for each in said:
        assert each in text


@needs_redis
@pytest.mark.parametrize("seconds", [3.0, 30.0])
async def test_redis_stands_still(tmp_path: Path, seconds: float) -> None:
    with redis_server() as server:

        async def pause(coordinators: list[Coordinator], counts: Counts) -> None:
            await asyncio.sleep(2)
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            server.signal(signal.SIGCONT)
            await asyncio.sleep(5)

        made = [Coordinator(server.url, tmp_path) for _ in range(2)]
        counts = await play_on(made, pause, NAMES)
        check(counts, tmp_path, "does not answer within", "state.recovered")


@needs_redis
async def test_one_of_two_is_cut_off_from_redis(tmp_path: Path) -> None:
    with redis_server() as server:
        async with held_link(server.port) as link:

            async def cut(coordinators: list[Coordinator], counts: Counts) -> None:
                for _ in range(2):
                    await asyncio.sleep(2)
                    coordinators[1].is_split = True
                    link.hold()
                    await asyncio.sleep(12)  # more than two leases
                    link.let_go()
                    await asyncio.sleep(5)
                    coordinators[1].is_split = False

            made = [
                Coordinator(url, tmp_path)
                for url in (server.url, f"redis://127.0.0.1:{link.port}/0")
            ]
            counts = await play_on(made, cut, NAMES)
            check(counts, tmp_path, "does not answer within", "state.recovered")


@needs_redis
async def test_clocks_of_coordinators_machines_differ_by_minutes(tmp_path: Path) -> None:
    with redis_server() as server:

        async def kill(coordinators: list[Coordinator], counts: Counts) -> None:
            for victim in coordinators:
                await asyncio.sleep(3)
                victim.kill()
                victim.start()
                await victim.answers()

        made = [Coordinator(server.url, tmp_path, clock_s=by_s) for by_s in (-300.0, 420.0)]
        check(await play_on(made, kill, NAMES), tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    made = shutil.which("mount") and subprocess.run(mount, check=False, capture_output=True)
    if not made or made.returncode:
        pytest.skip("no disk can be made here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_the_disk_is_full_and_free_again(tmp_path: Path, small_disk: Path) -> None:
    def fill() -> None:
        with (small_disk / "others").open("wb", buffering=0) as others:
            try:
                while others.write(bytes(4096)):
                    pass
            except OSError:
                pass

    async def fill_and_free(coordinators: list[Coordinator], counts: Counts) -> None:
        for _ in range(2):
            await asyncio.sleep(2)
            for _ in range(20):  # what SQLite gives back is taken
                fill()
                await asyncio.sleep(0.5)
            (small_disk / "others").unlink()
            await asyncio.sleep(5)

    made = [Coordinator(f"sqlite:{small_disk / 'state.db'}", tmp_path)]
    check(await play_on(made, fill_and_free, NAMES), tmp_path, "is full", "state.recovered")
