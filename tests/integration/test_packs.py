"""A pack of another distribution, as docs/packs.md makes it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from tests.support.commands import Command, free_port
from tests.support.daemon import ROOT
from tests.support.distributions import install, installed_commands

pytestmark = pytest.mark.integration


@pytest.fixture
def documented(tmp_path: Path) -> dict[str, str]:
    """An environment that has the pack of the page."""
    page = (ROOT / "docs" / "packs.md").read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [path for path, _ in blocks] == [
        f"mx_extra/{n}.py" for n in ("pack", "serving", "verbs")
    ]
    (entry,) = re.findall(r'entry-points."mx.packs"\]\n(.*?)\n```', page)
    name, _, target = entry.partition(" = ")
    return install(
        tmp_path / "site", dict(blocks), f"[mx.packs]\n{name} = {target.strip(chr(34))}\n"
    )


@pytest.fixture
def run() -> Iterator[Callable[..., Command]]:
    with installed_commands() as start:
        yield start


def test_the_pack_of_the_page(
    documented: dict[str, str], run: Callable[..., Command], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"layers.0.w": (64, 64)})
    at = ("--coordinator", f"127.0.0.1:{free_port()}")
    ready = tmp_path / "ready"
    environ = {**documented, "MX_PEER_COORDINATOR": at[1]}
    served = run(
        *("serve", str(tmp_path / "model.safetensors"), "--model", "m", "--json"),
        *("--listen", "127.0.0.1:0", "--ready-file", str(ready)),
        env={**documented},
    )
    found = served.json()
    assert ready.exists()
    environ["MX_PEER_COORDINATOR"] = found["coordinator"]
    size = run("size", "m", "--json", env=environ)
    assert size.wait() == 0, size.err
    assert json.loads(size.out)["bytes"] == found["bytes"]
    shown = run("config", "show", "--json", env={**environ, "MX_PEER_READY_FILE": "/x"})
    assert shown.wait() == 0, shown.err
    setting = json.loads(shown.out)["ready_file"]
    assert setting == {"value": "/x", "origin": "environment MX_PEER_READY_FILE"}
    code = "import mx; print(mx.total_nbytes())"
    total = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, stdout=subprocess.PIPE
    )
    assert int(total.stdout) == found["bytes"]
    served.signal(signal.SIGTERM)
    assert served.wait() == 0
    assert not ready.exists()


TAKES_OVER = """
from mx.packs import Pack
PACK = Pack(
    verbs={"pull": "taker:pull", "cache": "taker:pull"},
    names={"pull": "taker", "Router": "taker"},
    states={"redis": "taker:pull"},
)
pull = Router = None
"""


@pytest.mark.parametrize(
    ("module", "warns"),
    [
        (TAKES_OVER, False),
        ("import no_such_library", True),
        ("PACK = 1", True),
        ("raise RuntimeError('x')", True),
    ],
    ids=["takes over", "misses a library", "is none", "raises"],
)
def test_what_is_mx_s_own_stays(
    module: str, warns: bool, run: Callable[..., Command], tmp_path: Path
) -> None:
    environ = install(tmp_path, {"taker.py": module}, "[mx.packs]\ntaker = taker:PACK\n")
    code = """
import mx
from mx.cli.app import app
from mx import packs
import typer
group = typer.main.get_command(app)
assert group.get_command(None, "pull").callback.__module__ == "mx.cli.pull"
assert group.get_command(None, "cache").callback.__module__ == "mx.fleet.verbs"
assert mx.pull.__module__ == "mx.api.pulling" and mx.Router.__module__ == "mx.fleet.router"
assert packs.find("states", "redis").__class__.__module__ == "mx.redis_state.shared"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("the pack taker is left out" in done.stderr) == warns


def test_a_listener_that_fails_ends_no_command(tmp_path: Path) -> None:
    module = """
from mx.packs import Pack
PACK = Pack(listeners=("failing:hear", "failing:note"))
def hear(event, text):
    raise RuntimeError("it fails")
def note(event, text):
    print(event, text)
"""
    environ = install(tmp_path, {"failing.py": module}, "[mx.packs]\nfailing = failing:PACK\n")
    code = "from mx import packs; packs.tell('ready', 'serving m')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ready serving m\n"
    assert "a listener of a pack failed" in done.stderr and "it fails" in done.stderr
