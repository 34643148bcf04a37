"""KV blocks between GPUs, over the stand-in driver: hashed where they are, and no byte of them is
touched by a processor where the driver can move it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.logs import kept, parsed
from tests.support.driver.programs import Program, program
from tests.support.kv_blocks import key_file, until

MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not(MAJOR)), reason=why_not(MAJOR)),
]

LAYERS, SLOTS, BLOCKS = 4, 48, 32
#: Keys and values of a block in one layer.
PART_BYTES = 2 * 16 * 4 * 64 * 4

_PRELUDE = f"""
import gc
import json
import numpy as np
from mx import config
from mx.kv import BlockNames, KvKey, KvMemory, KvPool, KvReader, secret_of
from mx import namekey
from tests.support.driver.arrays import empty, values

LAYERS, SLOTS, BLOCKS = {LAYERS}, {SLOTS}, {BLOCKS}
# As engines have them: keys and values, blocks, tokens, heads, elements. Or blocks first: a part is
# one run of bytes.
LAYOUTS = {{"apart": ((2, SLOTS, 16, 4, 64), 1, 3), "together": ((SLOTS, 2, 16, 4, 64), 0, 3)}}
FORM = KvKey("test", "1", "f32", "any", 16, LAYERS, 4, 64)
settings = config.given(config.load(), name_key=KEY)
names = BlockNames(secret_of(namekey.load(settings), "m"), bytes(32), FORM).of(
    list(range(16 * BLOCKS)))

def cache(layout, where):
    shape, blocks, heads = LAYOUTS[layout]
    shapes = {{str(at): shape for at in range(LAYERS)}}
    if where == "cpu":
        held = {{name: np.zeros(shape, np.float32) for name in shapes}}
    else:
        held = empty(shapes, ordinal=int(where), kind=KIND)
    return held, KvMemory.of(list(held.values()), blocks, None)

def blocks_of(held, layout, slots):
    # In the order that names them, whatever the layout.
    found = []
    for each in held.values():
        whole = each if isinstance(each, np.ndarray) else each.get().reshape(each.shape)
        found.append(np.moveaxis(whole, LAYOUTS[layout][1], 0)[slots])
    return found
"""

_GIVES = (
    _PRELUDE
    + """
held, memory = cache(LAYOUT, WHERE)
shape = LAYOUTS[LAYOUT][0]
wanted = values({name: shape for name in held}, 1)
for name, array in held.items():
    if isinstance(array, np.ndarray):
        array[:] = wanted[name]
    else:
        array.set(wanted[name])
pool = KvPool.open("m", FORM, memory, settings=settings)
slots = pool.take(BLOCKS)
for block, slot in zip(names, slots):
    pool.publish(block, slot)
print(json.dumps([pool.endpoint, slots]))
for line in sys.stdin:
    if line.startswith("close"):
        pool.close()
        memory.close()
        held = memory = pool = array = None
        gc.collect()
        print("closed")
    elif line.startswith("spoil"):
        for array in held.values():
            array.set(-np.ones(shape, np.float32))
        print("spoilt")
    else:
        print(json.dumps(pool.counts() | {"wrong": pool.wrong}))
"""
)

_TAKES = (
    _PRELUDE
    + """
held, memory = cache(LAYOUT, WHERE)
reader = KvReader.open("m", FORM, memory, peers=[ENDPOINT], transport=TRANSPORT, settings=settings)
found = reader.wait_for(names, 60)
print(json.dumps([found, reader.peers()[ENDPOINT]]))
for line in sys.stdin:
    if line.startswith("close"):
        reader.close()
        memory.close()
        held = memory = reader = fetch = None
        gc.collect()
        print("closed")
        continue
    fetch = reader.fetch([(block, 3 + at) for at, block in enumerate(names)])
    assert fetch.wait(120)
    took = [np.ascontiguousarray(each) for each in blocks_of(held, LAYOUT, range(3, 3 + BLOCKS))]
    same = [(a == b).all(axis=tuple(range(1, a.ndim))).tolist() for a, b in zip(took, WANTED())]
    failed = sorted(names.index(block) for block in fetch.failed)
    print(json.dumps([failed, same, fetch.errors]))
"""
)


@contextmanager
def both(
    tmp_path: Path,
    *,
    layouts: tuple[str, str] = ("together", "together"),
    where: tuple[str, str] = ("0", "1"),
    transport: str | None = "cuda_ipc",
    kind: str = "malloc",
    **settings: object,
) -> Iterator[tuple[Program, Program, Path]]:
    """Run a process that lists blocks, and one that has found them all, whose calls `FAIL`."""
    key = key_file(tmp_path)
    log = tmp_path / "log"
    log.mkdir()
    settings = {"KERNELS": True, "LOG": log, **settings}
    heads = [
        f"KEY, LAYOUT, WHERE, KIND, TRANSPORT = {str(key)!r}, {layout!r}, {at!r}, {kind!r}, "
        f"{transport!r}\n"
        for layout, at in zip(layouts, where, strict=True)
    ]
    fails = settings.pop("FAIL", "")
    with program(MAJOR, heads[0] + _GIVES, **settings) as gives:
        endpoint, slots = json.loads(gives.read())
        wanted = f"""
ENDPOINT = {endpoint!r}
def WANTED():
    shape, blocks, _ = LAYOUTS[{layouts[0]!r}]
    made = values({{str(at): shape for at in range(LAYERS)}}, 1)
    return [np.moveaxis(each, blocks, 0)[{slots!r}] for each in made.values()]
"""
        with program(MAJOR, heads[1] + wanted + _TAKES, **settings, FAIL=fails) as takes:
            found, how = json.loads(takes.read())
            assert (found, how) == (BLOCKS, transport or how)
            yield gives, takes, log


def all_came(takes: Program) -> None:
    failed, same, errors = json.loads(takes.ask("fetch"))
    assert (failed, errors) == ([], [])
    assert same == [[True] * BLOCKS] * LAYERS


def closed(gives: Program, takes: Program, log: Path) -> None:
    """Close both; then nothing of either is left on the GPU."""
    assert takes.ask("close") == "closed"
    assert gives.ask("close") == "closed"
    for each in log.glob("*.log"):
        assert kept(parsed(each.read_text().splitlines())) == []


def copies(log: Path, process: int) -> Counter[str]:
    """Return how often each kind of copy was called for, and kernels were launched."""
    made = parsed((log / f"{process}.log").read_text().splitlines())
    return Counter(name for name, _ in made if name.startswith(("cuMemcpy", "cuLaunch")))


@pytest.mark.parametrize(
    ("layouts", "where", "transport"),
    [
        (("together", "together"), ("0", "1"), "cuda_ipc"),
        pytest.param(("apart", "together"), ("0", "0"), "cuda_ipc", marks=pytest.mark.long),
        pytest.param(("together", "apart"), ("0", "1"), "pcie_p2p", marks=pytest.mark.long),
        (("apart", "apart"), ("0", "1"), "tcp"),
        pytest.param(("together", "together"), ("cpu", "0"), None, marks=pytest.mark.long),
        pytest.param(("together", "together"), ("0", "cpu"), None, marks=pytest.mark.long),
    ],
)
def test_blocks_are_those_of_the_maker(
    tmp_path: Path, layouts: tuple[str, str], where: tuple[str, str], transport: str | None
) -> None:
    with both(tmp_path, layouts=layouts, where=where, transport=transport) as (gives, takes, log):
        all_came(takes)
        closed(gives, takes, log)


def test_no_processor_touches_a_byte(tmp_path: Path) -> None:
    """Slots that follow each other are one copy: of each layer there is one."""
    with both(tmp_path) as (gives, takes, log):
        before = copies(log, takes.process.pid)
        failed, _, _ = json.loads(takes.ask("fetch"))
        assert failed == []
        # What the test looks at is downloaded layer by layer.
        made = copies(log, takes.process.pid) - before
        assert made["cuMemcpyDtoDAsync"] == LAYERS
        assert made["cuLaunchKernel"] <= 2  # the trial, and the digests of all parts
        down = nbytes_of(log, takes.process.pid, "cuMemcpyDtoHAsync")
        looked_at = LAYERS * SLOTS * PART_BYTES
        digests = LAYERS * BLOCKS * 32
        assert looked_at <= down <= looked_at + digests + 4096
        # The giver's digests alone come to the host.
        there = nbytes_of(log, gives.process.pid, "cuMemcpyDtoHAsync")
        assert there <= LAYERS * BLOCKS * 32 + 4096
        closed(gives, takes, log)


def nbytes_of(log: Path, process: int, call: str) -> int:
    """Return how many bytes a process has had copied by such calls."""
    text = (log / f"{process}.log").read_text()
    found = [line.partition(f"{call}(")[2] for line in text.splitlines() if f"{call}(" in line]
    return sum(int(each.split(",")[2].split(")")[0]) for each in found)


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
def test_what_was_changed_is_a_miss_and_its_blocks_go(tmp_path: Path, transport: str) -> None:
    with both(tmp_path, transport=transport) as (gives, takes, log):
        assert gives.ask("spoil") == "spoilt"
        failed, _, _ = json.loads(takes.ask("fetch"))
        assert failed == list(range(BLOCKS))
        # The reader has told it; it has hashed them again, and lists them no more.
        until(lambda: json.loads(gives.ask("counts"))["wrong"])
        counts = json.loads(gives.ask("counts"))
        assert counts["listed"] + counts["wrong"] == BLOCKS
        closed(gives, takes, log)


@pytest.mark.long
def test_a_maker_that_dies(tmp_path: Path) -> None:
    with both(tmp_path, LATE_US=20_000) as (gives, takes, _):
        gives.kill()
        failed, _, _ = json.loads(takes.ask("fetch"))
        assert len(failed) == BLOCKS
        assert takes.ask("close") == "closed"


@pytest.mark.long
@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync:1", "cuLaunchKernel:2", "cuMemAlloc:5"])
def test_a_call_that_fails_is_a_miss(tmp_path: Path, call: str) -> None:
    fails = f"{call}:CUDA_ERROR_OUT_OF_MEMORY"
    with both(tmp_path, FAIL=fails) as (gives, takes, log):
        failed, same, errors = json.loads(takes.ask("fetch"))
        assert failed and errors, "the call that fails was not made"
        assert right_but(failed, same)
        # It fails once: the blocks are there as soon as the pool is reached again.
        until(lambda: json.loads(takes.ask("fetch"))[0] == [])
        all_came(takes)
        closed(gives, takes, log)


def right_but(failed: list[int], same: list[list[bool]]) -> bool:
    """Return True if all blocks are right in all layers, but for those that failed."""
    return all(all(layers) or at in failed for at, layers in enumerate(zip(*same, strict=True)))
