"""`--out` and `out=` lead through no link of another user, who is a real one: only root has one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx import api
from mx.errors import OutputError
from tests.support.commands import Run
from tests.support.privileges import NOBODY, as_nobody, as_root, done

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), as_root]


@pytest.fixture
def link() -> Iterator[Path]:
    """A link of another user's, in a folder like /tmp, to a folder of that user's."""
    shared = Path(tempfile.mkdtemp(prefix="mx-shared-"))
    shared.chmod(0o1777)
    theirs = shared / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, NOBODY, NOBODY)
    done(as_nobody("os.symlink(sys.argv[1], sys.argv[2])", theirs, shared / "llama"))
    yield shared / "llama"
    assert not list(theirs.iterdir())
    shutil.rmtree(shared)


@pytest.mark.parametrize("name", ["", "out"])
def test_a_pull_writes_nothing_through_it(link: Path, name: str, checkpoint: Path) -> None:
    said = "llama is a link that belongs to the user nobody"
    with (
        api.pull("m", path=checkpoint, out=link / name) as pull,
        pytest.raises(OutputError, match=said),
    ):
        pull.wait(60)


def test_the_command_writes_nothing_through_it(run: Run, link: Path, checkpoint: Path) -> None:
    command = run("pull", "m", "--from", f"disk={checkpoint}", "--out", str(link))
    assert command.wait(60) == 1
    assert f"{link} is a link that belongs to the user nobody" in command.err
    assert "--out" in command.err
