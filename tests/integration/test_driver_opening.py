"""How many allocations of a source are open when, and what follows where one can't be: over the
stand-in driver, which logs every call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.programs import Program, program

MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not(MAJOR)), reason=why_not(MAJOR)),
]

#: Tensors of 1 MiB, which is a chunk each: three in a layer.
_ARRAYS = """
import json
import mx
from mx import api
from mx.fetching.delivery import Delivery
from mx.fetching.job import Job
from mx.memory.device import HostReader
from tests.support.driver.arrays import empty, values

SHAPES = {f"model.layers.{n}.w{i}": (512, 512) for n in range(LAYERS) for i in range(3)}
"""

_LENDER = (
    _ARRAYS
    + """
held, wanted = empty(SHAPES, KIND), values(SHAPES, 1)
for name, array in held.items():
    array.set(wanted[name])
source = api.serve(held, model="m", copy=False, coordinator="ADDRESS", frozen=True)
print("lent")
for line in sys.stdin:
    source.close()
    print("closed")
"""
)

#: Pulls as its input says, and prints how it ended, with how many allocations were open at each
#: layer's event, and at the end. `held_up` holds up what reports layers once the first is.
_READER = (
    _ARRAYS
    + """
import gc
import numpy as np
OPENS = ("cuIpcOpenMemHandle(", "cuMemImportFromShareableHandle(")

def opens():
    with open(f"{os.environ['MX_STANDIN_LOG']}/{os.getpid()}.log") as file:
        return sum(line.split(" ", 1)[1].startswith(OPENS) for line in file if line[0] != "#")

open_at, held_up, seen = {}, threading.Event(), threading.Event()

def counted(method):
    def announce(self, arena, layer, by):
        open_at.setdefault(layer, opens())
        method(self, arena, layer, by)
        if held_up.is_set():
            assert seen.wait(200)
    return announce
Delivery.announce = counted(Delivery.announce)

def released(job, close=Job.close):
    close(job)
    seen.set()
Job.close = released  # what is held up goes on when nothing more is to be reported

def right(pull):
    layout, reader, wanted = pull.manifest.layout, HostReader(), values(SHAPES, 1)
    memory = pull.memory()
    for tensor in layout.tensors:
        at = layout.layers[tensor.layer].arena_offset + tensor.offset
        found = np.frombuffer(reader.whole(memory[at : at + tensor.nbytes]), np.float32)
        assert (found == wanted[tensor.name].reshape(-1)).all(), tensor.name
    reader.close()

def whole(**options):
    open_at.clear()
    with mx.pull("m", coordinator="ADDRESS", device="cuda:0", **options) as pull:
        report = pull.wait()
        right(pull)
        paths = [(path.transport, path.attached) for path in report.paths]
    return paths, [open_at[layer] for layer in range(LAYERS)], opens()

def begun():
    global pull, layers
    held_up.set()
    pull = mx.pull("m", coordinator="ADDRESS", device="cuda:0")
    layers = pull.layers()
    return next(layers).index, opens()

def next_layer():
    seen.set()
    try:
        return next(layers).index
    except mx.MxError as error:
        return type(error).__mro__[0].__name__, str(error)

def closed():
    global pull, layers
    pull.close()
    pull = layers = None
    gc.collect()
    return opens()

print("ready")
for line in sys.stdin:
    print(json.dumps(eval(line)))
"""
)


@contextmanager
def both(
    folder: Path, coordinator: str, kind: str, layers: int, **settings: object
) -> Iterator[tuple[Program, Program]]:
    """Give a lender of a model of some layers in memory of a kind, and a reader."""
    head = f"LAYERS, KIND = {layers}, {kind!r}\n"
    lending, reading = (head + code.replace("ADDRESS", coordinator) for code in (_LENDER, _READER))
    settings = {"KERNELS": True, "LOG": folder, **settings}
    fails = settings.pop("FAIL", "")
    with (
        program(MAJOR, lending, **settings) as lender,
        program(MAJOR, reading, **settings, FAIL=fails) as reader,
    ):
        assert (lender.read(), reader.read()) == ("lent", "ready")
        yield lender, reader


#: How many allocations have the first layer's three tensors: torch's expandable segments have
#: pieces of 2 MiB.
FIRST = {"malloc": 3, "vmm": 3, "segment": 2}
#: How many each layer adds, two at a time.
PAIR = {"malloc": 6, "vmm": 6, "segment": 3}


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize("layers", [2, pytest.param(40, marks=pytest.mark.long)])
def test_a_layer_waits_for_its_own_allocations(
    kind: str, layers: int, tmp_path: Path, coordinator: str
) -> None:
    with both(tmp_path, coordinator, kind, layers) as (_, reader):
        every = layers // 2 * PAIR[kind]
        paths, at, end = json.loads(reader.ask("whole()"))
        assert paths == [["cuda_ipc", True]]
        assert at[0] == FIRST[kind] and at[1] == PAIR[kind] and at[-1] == end == every
        # A copy opens what its reads touch: by the first event only those of the first layer.
        paths, at, end = json.loads(reader.ask("whole(attach=False)"))
        assert paths == [["cuda_ipc", False]]
        assert at[0] == every + FIRST[kind] and end == 2 * every


@pytest.mark.parametrize("kind", ["malloc", pytest.param("segment", marks=pytest.mark.long)])
def test_what_cannot_be_attached_to_its_end_is_copied(
    kind: str, tmp_path: Path, coordinator: str
) -> None:
    call = "cuIpcOpenMemHandle" if kind == "malloc" else "cuMemImportFromShareableHandle"
    for nth in (1, FIRST[kind], FIRST[kind] + 1):
        folder = tmp_path / str(nth)
        folder.mkdir()
        fail = f"{call}:{nth}:CUDA_ERROR_INVALID_HANDLE"
        with both(folder, coordinator, kind, 4, FAIL=fail) as (lender, reader):
            paths, _, _ = json.loads(reader.ask("whole()"))
            assert [attached for _, attached in paths] == [False], (nth, paths)
            assert lender.ask("") == "closed"  # nothing of it is mapped any more


def test_a_caller_that_has_seen_a_layer_is_told(tmp_path: Path, coordinator: str) -> None:
    fail = "cuIpcOpenMemHandle:4:CUDA_ERROR_INVALID_HANDLE"
    with both(tmp_path, coordinator, "malloc", 4, FAIL=fail) as (lender, reader):
        assert json.loads(reader.ask("begun()")) == [0, 3]
        kind, said = json.loads(reader.ask("next_layer()"))
        assert kind == "PathError" and "cuIpcOpenMemHandle failed" in said
        assert json.loads(reader.ask("closed()")) == 6  # all that the second layer needs was tried
        assert lender.ask("") == "closed"


@pytest.mark.parametrize("kind", ["malloc", pytest.param("vmm", marks=pytest.mark.long)])
def test_a_source_that_dies_while_it_is_attached(
    kind: str, tmp_path: Path, coordinator: str
) -> None:
    with both(tmp_path, coordinator, kind, 4) as (lender, reader):
        assert json.loads(reader.ask("begun()")) == [0, 3]
        lender.kill()
        failure, _ = json.loads(reader.ask("next_layer()"))
        assert failure == {"malloc": "PathError", "vmm": "PeerLostError"}[kind]


def test_a_closed_pull_opens_no_more(tmp_path: Path, coordinator: str) -> None:
    with both(tmp_path, coordinator, "vmm", 4) as (lender, reader):
        assert json.loads(reader.ask("begun()")) == [0, 3]
        assert json.loads(reader.ask("closed()")) == 3
        assert lender.ask("") == "closed"
