"""What befalls programs whose models come from peers: sources that stop, a full disk, forks and
interrupts."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support import families, forkserver
from tests.support.caching import origin, unavailable
from tests.support.commands import Command, commands, environment, start_coordinator

_REASON = unavailable()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_REASON is not None, reason=_REASON or ""),
]

SLOW = ("--max-bandwidth", "8MB/s")
#: `python -m mx.engines.transformers`, which imports transformers before all else.
_PATCHED = "from mx.engines.transformers.__main__ import main; main()"

#: What all programs begin with. `said` is printed in the end.
_BEGIN = """
import json, os, signal, sys, threading, time
import torch
from transformers import AutoModelForCausalLM
from mx.engines.transformers import counts, weights

source, folder, link = int(sys.argv[1]), sys.argv[2], sys.argv[3]
tensor = weights.Weights.tensor

def load(name="org/model"):
    return AutoModelForCausalLM.from_pretrained(name)

def same(model):
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
"""
_END = "\nprint(json.dumps(said))\n"


@dataclass(frozen=True)
class Site:
    """A coordinator, a checkpoint's folder, and a folder of the test's own."""

    coordinator: str
    folder: Path
    root: Path

    @property
    def link(self) -> Path:
        """Where the hub's cache has the checkpoint once this is a link to its folder."""
        return hub_of(self.folder) / "models--org--model" / "snapshots" / ("0" * 40)

    @contextmanager
    def program(
        self, source: Command, code: str, *prefix: str, stall_s: int = 10
    ) -> Iterator[forkserver.Forked | subprocess.Popen[str]]:
        """Run a program whose `from_pretrained` is patched."""
        script = self.root / "program.py"
        script.write_text(_BEGIN + code + _END)
        arguments = [str(script), str(source.process.pid), str(self.folder), str(self.link)]
        env = environment(
            MX_PEER_COORDINATOR=self.coordinator,
            MX_PEER_CACHE_SOCKET="off",
            MX_PEER_STALL_TIMEOUT_S=str(stall_s),
            TMPDIR=str(self.root / "tmp"),
            **at_import(self.folder),
        )
        if prefix:
            process: forkserver.Forked | subprocess.Popen[str] = subprocess.Popen(
                [*prefix, sys.executable, "-c", _PATCHED, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
        else:
            process = forkserver.python(
                _PATCHED, *arguments, env=env, imported="transformers", errors=True
            )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def ran(
        self, source: Command, code: str, *prefix: str, stall_s: int = 10
    ) -> tuple[dict[str, Any], str]:
        """Run a program; return what it says, and its log."""
        with self.program(source, code, *prefix, stall_s=stall_s) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        said = json.loads(out.splitlines()[-1])
        assert isinstance(said, dict)
        return said, err


def hub_of(folder: Path) -> Path:
    """The hub's cache beside a checkpoint's folder: what names it is read at an import."""
    return folder.with_name("hub")


def at_import(folder: Path) -> dict[str, str]:
    """What is read from the environment when transformers is imported."""
    return {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_of(folder)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A coordinator, and a Llama of 10 MB."""
    folder = tmp_path_factory.mktemp("bad_luck") / "model"
    shape: Any = {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    families.save(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)), folder)
    programs = forkserver.running(environment(**at_import(folder)), "transformers")
    with programs, commands() as run:
        yield start_coordinator(run)[0], folder


@pytest.fixture
def site(made: tuple[str, Path], tmp_path: Path) -> Site:
    found = Site(*made, tmp_path)
    (tmp_path / "tmp").mkdir()
    shutil.rmtree(hub_of(found.folder), ignore_errors=True)
    found.link.parent.mkdir(parents=True)
    refs = found.link.parent.with_name("refs")
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    return found


def test_the_only_source_stops(site: Site) -> None:
    """With no files on disk that is an error, with them they are read; then the source goes on."""
    code = """
def stopping(self, name):
    os.kill(source, signal.SIGSTOP)
    return tensor(self, name)

weights.Weights.tensor = stopping
try:
    load()
except OSError as error:
    cause = type(error.__cause__)
weights.Weights.tensor = tensor
deadline = time.monotonic() + 30
while threads := [each.name for each in threading.enumerate() if each.name.startswith("mx-")]:
    if time.monotonic() > deadline:
        break
    time.sleep(0.1)
os.symlink(folder, link)
right = [same(load())]
os.kill(source, signal.SIGCONT)
deadline = time.monotonic() + 60
while not counts()["peer"]:
    right.append(same(load()))
    assert time.monotonic() < deadline
said = {"cause": [cause.__module__, cause.__name__], "right": all(right), "counts": counts(),
        "threads": threads}
"""
    with origin(site.folder, "org/model", site.coordinator, *SLOW) as source:
        said, log = site.ran(source, code, stall_s=1)
    assert said["cause"][0] == "mx.errors"
    assert said["right"]
    assert said["threads"] == []
    assert not [*(site.root / "tmp").iterdir()]
    assert "org/model: not from peers: " in log


def test_two_interrupts(site: Site) -> None:
    # A pool of threads that is interrupted while it starts one is never joined, whatever mx does:
    # so the interrupts come once the program waits for tensors.
    code = """
going_on = threading.Event()

def waiting():
    frame, names = sys._current_frames()[threading.main_thread().ident], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "result" in names or threading.current_thread() is threading.main_thread()

def going(self, name):
    while not going_on.is_set() and not waiting():
        time.sleep(0.05)
    going_on.set()  # the main thread may wait for the others elsewhere, once it is interrupted
    os.write(1, b"going\\n")  # several threads come here
    return tensor(self, name)

weights.Weights.tensor = going
said = {}
load()
"""
    with (
        origin(site.folder, "org/model", site.coordinator, "--max-bandwidth", "1MB/s") as source,
        site.program(source, code) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        if line != "going\n":
            raise AssertionError(process.communicate(timeout=60))
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "mx.errors" not in err
    assert not [*(site.root / "tmp").iterdir()]


def test_a_fork_while_a_model_arrives(site: Site) -> None:
    code = """
from mx.engines.transformers import load, loading
from mx.errors import ForkError

model = load("org/model")
pid = os.fork()
if not pid:
    signal.alarm(60)  # one that hangs is killed
    refused = 0
    for call in (
        lambda: model(torch.arange(4)[None]),
        lambda: loading(model).wait(),
        lambda: loading(model).progress(),
        lambda: load("org/model"),
    ):
        try:
            call()
        except ForkError:
            refused += 1
    loading(model).close()
    del model
    sys.exit(5 if refused == 4 else refused)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
loading(model).wait()
said = {"code": code, "same": same(model)}
"""
    with origin(site.folder, "org/model", site.coordinator, *SLOW) as source:
        said, log = site.ran(source, code)
    assert said == {"code": 5, "same": True}
    assert "Traceback" not in log


@pytest.mark.parametrize("inodes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_no_room_for_the_files_of_a_model(site: Site, inodes: int) -> None:
    """It comes from disk; where it is not there either, the error says what was full."""
    code = """
try:
    load()
except OSError as error:
    notes = error.__notes__
os.symlink(folder, link)
said = {"notes": notes, "same": same(load()), "counts": counts()}
"""
    with origin(site.folder, "org/model", site.coordinator, *SLOW) as source:
        said, _ = site.ran(source, code, *_full(site.root / "tmp", inodes))
    assert any("No space left on device" in note for note in said["notes"]), said
    assert said["same"] and said["counts"]["disk"] == 2


@pytest.mark.parametrize("inodes", [1, 2])
def test_no_room_for_the_socket_of_a_cache(site: Site, inodes: int) -> None:
    folder = site.root / "tmp"
    folder.chmod(0o700)
    done = subprocess.run(
        [
            *_full(folder, inodes),
            *(sys.executable, "-c", "from mx.cli import main; main()"),
            *("serve", "--cache", "--memory", "64MB", "--cache-socket", f"{folder}/cache.sock"),
            *("--coordinator", site.coordinator),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (1, 2)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def _full(folder: Path, inodes: int) -> list[str]:
    """Return what a command is started with so that `folder` takes so few files, itself among
    them, and no more than a page."""
    mount = f'mount -t tmpfs -o mode=0700,size=4k,nr_inodes={inodes} none "$1"; shift; exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(folder)]
