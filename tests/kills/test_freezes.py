"""A few kills of freezes, full disks, and two at once; `make kills STATE=freezes` is the long
round."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import mx
from mx.errors import CapacityError
from mx.snapshots.container import SNAPSHOT
from tests.kills.freezes import Site, ended, play, site

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]


def test_what_a_killed_freeze_leaves_never_loads_in_part(tmp_path: Path) -> None:
    random.seed(3)
    counts = play(6, tmp_path)
    assert not counts.wrong, counts.wrong
    assert counts.kills == 6 and counts.did["begun"], counts


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as found:
        yield found


def test_of_two_at_once_one_is_told(here: Site) -> None:
    both = [here.begun(), here.begun()]
    found = [ended(each) for each in both]
    assert 0 in {code for code, _ in found}, found
    for code, said in found:  # it went on from the other's ranks, or was told
        told = "another mx is writing" in said or "snapshot of m" in said or "not empty" in said
        assert code == 0 or told, said
    assert not here.wrong() and (here.out / SNAPSHOT).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="it mounts a small disk")
def test_a_full_disk_leaves_nothing(here: Site, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("this container mounts nothing")
    try:
        here.out = disk / "snapshot"  # 24 MB a rank
        code, said = ended(here.begun())
        assert code and CapacityError.__name__ in said
        assert not (here.out / SNAPSHOT).exists() and not here.loads_in_part()
        # There is room again, and it goes on from the rank that was written, if one was.
        subprocess.run(["mount", "-o", "remount,size=90m", str(disk)], check=True)
        code, said = ended(here.begun())
        assert code == 0, said
        assert not here.wrong() and (here.out / SNAPSHOT).exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_weights_that_change_meanwhile_are_one_revision_or_none(here: Site, tmp_path: Path) -> None:
    import torch

    live = {name: tensor.clone() for name, tensor in here.states[0].items()}
    out = tmp_path / "changing"
    with mx.serve(
        live, model="l", coordinator=here.coordinator, copy=False, settings=here.settings
    ) as source:
        before = {name: tensor.clone() for name, tensor in live.items()}

        def change(pull: mx.Pull, key: object) -> mx.PullReport:
            with source.changing():
                for tensor in live.values():
                    tensor.add_(1)
            return pull.wait()

        kept = None
        try:
            mx.freeze(source, out, settings=here.settings, wait=change)
        except mx.MxError as error:
            kept = error
    if kept is None:
        with mx.pull("l", source="snapshot", path=out, settings=here.settings) as pull:
            pull.wait()
            found = pull.state_dict()
        assert all(torch.equal(found[name], before[name]) for name in before)
    else:
        assert not (out / SNAPSHOT).exists()
