"""The commands' exit codes after ucx, with whatever rdma-core the machine has, and without any."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mx import plugins
from mx.errors import EXIT_INCOMPLETE, EXIT_NO_SOURCE, EXIT_OK
from mx.transport import Unavailable
from tests.support import rdma_core
from tests.support.commands import Run, environment, serve
from tests.support.tensors import same

_PROBED = plugins.transports()["ucx"].probe()

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(isinstance(_PROBED, Unavailable), reason=getattr(_PROBED, "reason", "")),
]

without = pytest.param(
    rdma_core.hidden_from,
    id="without rdma-core",
    marks=pytest.mark.skipif(
        not rdma_core.can_hide(), reason="hiding rdma-core takes root and unshare"
    ),
)
around = pytest.mark.parametrize("around", [pytest.param(list, id="as it is"), without])
Around = Callable[[Sequence[str]], Sequence[str]]

PULL = [sys.executable, "-c", "from mx.cli import main; main()", "pull", "m", "--transport", "ucx"]
SCRIPT = """
import atexit, sys
import mx
atexit.register(print, "atexit")
with mx.pull("m", coordinator=sys.argv[1], transport="ucx") as pull:
    pull.wait(60)
    print(len(pull.state_dict()))
{}
"""


def ended(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment()
    )


@pytest.mark.timeout(180)
@around
def test_a_pull_that_succeeded_ends_with_0(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path, around: Around
) -> None:
    source = serve(run, checkpoint, "m", coordinator)
    out = tmp_path / "out"
    at = ["--coordinator", coordinator, "--json", "--out", str(out)]
    done = ended(around([*PULL, *at]))
    assert done.returncode == EXIT_OK, done.stderr
    assert {path["transport"] for path in json.loads(done.stdout)["paths"]} == {"ucx"}
    assert same(load_file(out / "model.safetensors"), load_file(checkpoint))
    source.process.terminate()
    assert source.wait() == EXIT_OK


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("last", "code"), [("sys.exit(7)", 7), ("raise KeyError", 1)])
def test_a_script_ends_with_its_own_code(
    run: Run, coordinator: str, checkpoint: Path, last: str, code: int
) -> None:
    serve(run, checkpoint, "m", coordinator)
    script = SCRIPT.format(last)
    done = ended([sys.executable, "-W", "error", "-c", script, coordinator])
    assert done.returncode == code, done.stderr
    tensors, at_exit = done.stdout.split()
    assert int(tensors) == len(load_file(checkpoint))
    assert at_exit == "atexit"


@pytest.mark.timeout(180)
def test_a_pull_whose_source_died_in_the_middle_ends_with_6(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    source = serve(run, checkpoint, "m", coordinator, "--max-bandwidth", "2MB/s")
    pull = run("pull", "m", "--transport", "ucx", "--coordinator", coordinator, "--json")
    pull.until(lambda: "layer" in pull.err, "a layer")
    source.process.kill()
    assert pull.wait(90) == EXIT_INCOMPLETE, pull.err
    assert "Traceback" not in pull.err


FORKING = """
import os, signal, sys, time
import mx
from mx.errors import ForkError

children = []
with mx.pull("m", coordinator=sys.argv[1], transport="ucx", attach=False) as pull:
    while pull.progress().bytes_done == 0 and len(children) < 12:
        child = os.fork()
        if not child:
            signal.alarm(30)  # a child that hangs is killed
            try:
                mx.list_models(coordinator=sys.argv[1])
            except ForkError:
                sys.exit(5)
        children.append(child)
        time.sleep(0.02)
    print(pull.wait(60).layers)
print({os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children})
"""


@pytest.mark.timeout(180)
def test_forks_while_ucx_starts_hang_nowhere(run: Run, coordinator: str, checkpoint: Path) -> None:
    serve(run, checkpoint, "m", coordinator)
    done = ended([sys.executable, "-c", FORKING, coordinator])
    assert (done.returncode, done.stdout.split()) == (0, ["10", "{5}"]), done.stderr


#: argv: when the signal comes, then the command's arguments. Its load takes longer than all else.
WHILE_LOADING = """
import os, signal, sys, threading, time
from mx.cli import main
from mx_transports.ucx import nixl

load, begun = nixl.load, threading.Event()

def slowly(peer):
    begun.set()
    time.sleep(0.5)
    load(peer)
    print("loaded", flush=True)

nixl.load = slowly
if sys.argv.pop(1) == "interrupt":
    thread = threading.Thread(
        target=lambda: (begun.wait(60), os.kill(os.getpid(), signal.SIGINT)), daemon=True
    )
    thread.start()
main()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("when", "code"), [("never", EXIT_NO_SOURCE), ("interrupt", 130)])
def test_a_command_that_ends_while_ucx_loads_waits_for_it(
    coordinator: str, when: str, code: int
) -> None:
    pull = ("pull", "unknown", "--transport", "ucx", "--coordinator", coordinator)
    done = ended([sys.executable, "-W", "error", "-c", WHILE_LOADING, when, *pull])
    assert (done.returncode, done.stdout) == (code, "loaded\n"), done.stderr
    assert "Traceback" not in done.stderr
