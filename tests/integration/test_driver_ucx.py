"""NIXL's UCX over the stand-in driver: device memory as NIXL's VRAM segments, between processes.

Device addresses have no access here, so what arrives was moved by the driver. The last tests hold
what an agent with device memory can do to its process.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mx_transports.ucx import UcxTransport
from mx_transports.ucx import nixl as installed
from tests.support.driver.logs import calls
from tests.support.driver.programs import Program, each_major, passes, program

_PROBED = UcxTransport().probe()
pytestmark = [
    each_major,
    pytest.mark.skipif(installed.find() is None, reason=getattr(_PROBED, "reason", "")),
]

_NBYTES = 9 << 20
#: UCX's cache of what is device memory sees all of it only where CUDA's runtime is loaded, too.
_COMMON = """
import ctypes, json
from mx_transports.ucx import agent as agents
from mx_transports.ucx import nixl as installed

NBYTES = {nbytes}
EXPECTED = (bytes(range(251)) * (NBYTES // 251 + 1))[:NBYTES]
nixl = agents.load_bindings(installed.find().bindings)

def start():
    os.environ.update(installed.LIBRARY_SETTINGS)
    ours = {{"TLS": "{tls}", "MEMTYPE_CACHE": "n", "MODULES": "all", "NET_DEVICES": "lo"}}
    os.environ.update((f"UCX_{{name}}", value) for name, value in ours.items())
    return agents.new_agent(nixl, "TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k")

def register(agent, backends, segment, address, ordinal=0):
    descs = nixl.nixlRegDList(segment)
    descs.addDesc((address, NBYTES, ordinal, ""))
    agent.registerMem(descs, backends)

def part(segment, address, ordinal=0):
    descs = nixl.nixlXferDList(segment)
    descs.addDesc((address, NBYTES, ordinal))
    return descs

"""

#: Says where its memory is, polls, and ends when told to. The agent's thread has no context.
_SOURCE = """
use()
{memory}

def serve():
    try:
        agent, backends = start()
        register(agent, backends, nixl.VRAM_SEG, address)
        print(json.dumps([agent.getLocalMD().hex(), address]))
        while serving:
            agent.getNotifs({{}}, backends)
            time.sleep(20e-6)
    except nixl.nixlBackendError:
        print("refused")

serving = [True]
thread = threading.Thread(target=serve)
thread.start()
sys.stdin.readline()
serving.clear()
thread.join()
print(call("cuMemGetAddressRange", address)[1])
"""
_ALLOCATED = 'address = alloc(NBYTES)\ncall("cuMemcpyHtoD", address, EXPECTED, NBYTES)'
_MAPPED = """
memory = Vmm(10 * MIB)
memory.allow()
address = memory.address
call("cuMemcpyHtoD", address, EXPECTED, NBYTES)
"""
#: As an agent's process would have it, which is not the memory's owner.
_OPENED = """
handle = driver.CUipcMemHandle()
ctypes.memmove(int(handle.getPtr()), bytes.fromhex(input()), 64)
address = int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS))
"""
_OWNER = (
    _ALLOCATED.join(["use()\n", "\n"])
    + """
print(ctypes.string_at(int(call("cuIpcGetMemHandle", address).getPtr()), 64).hex())
sys.stdin.readline()
"""
)

#: Reads it into memory of `kinds`, each of which it names with how it went.
_READER = """
context = use(1)

def target(kind):
    if kind == "VRAM":
        return nixl.VRAM_SEG, alloc(NBYTES), 1
    if kind == "pinned":
        return nixl.DRAM_SEG, pinned(NBYTES), 0
    hold = (ctypes.c_char * NBYTES)()
    holds.append(hold)
    return nixl.DRAM_SEG, ctypes.addressof(hold), 0

def read(metadata, remote):
    agent, backends = start()
    name = agent.loadRemoteMD(bytes.fromhex(metadata)).decode()
    for kind, place in targets:
        register(agent, backends, *place)
        handle = agent.createXferReq(
            nixl.NIXL_READ, part(*place), part(nixl.VRAM_SEG, remote), name
        )
        agent.postXferReq(handle)
        while agent.getXferStatus(handle) != nixl.NIXL_SUCCESS:
            if {leaves} and ctypes.string_at(place[1], 1) == EXPECTED[:1]:
                print("left")
                return
        agent.releaseXferReq(handle)
        print(kind)

holds = []
targets = [(kind, target(kind)) for kind in {kinds}]

def main(*arguments):
    try:
        read(*arguments)
    except (nixl.nixlBackendError, nixl.nixlRemoteDisconnectError) as found:
        print(type(found).__name__)

thread = threading.Thread(target=main, args=json.loads(input()))
thread.start()
thread.join()
for kind, (_, address, _) in targets:
    found = fetch(address, NBYTES) if kind == "VRAM" else ctypes.string_at(address, NBYTES)
    print(found == EXPECTED)
"""


def _source(memory: str = _ALLOCATED, tls: str = "tcp,cuda_copy", nbytes: int = _NBYTES) -> str:
    return (_COMMON + _SOURCE).format(memory=memory, tls=tls, nbytes=nbytes)


def _reader(
    *kinds: str, tls: str = "tcp,cuda_copy", leaves: bool = False, nbytes: int = _NBYTES
) -> str:
    return (_COMMON + _READER).format(kinds=kinds, tls=tls, leaves=leaves, nbytes=nbytes)


def _reads(there: Program, here: Program, *kinds: str) -> None:
    first, *others = kinds
    assert here.ask(there.read()) == first
    assert [here.read() for _ in (*others, *kinds)] == [*others, *["True"] * len(kinds)]
    assert int(there.ask("")) >= _NBYTES


@pytest.mark.parametrize("memory", [_ALLOCATED, _MAPPED], ids=["allocated", "mapped"])
def test_device_memory_is_read(major: int, memory: str, tmp_path: Path) -> None:
    kinds = ("VRAM", "host", "pinned")
    with (
        program(major, _source(memory), LOG=tmp_path) as there,
        program(major, _reader(*kinds)) as here,
    ):
        _reads(there, here, *kinds)
        copies = calls(tmp_path, there.process.pid).count(("cuMemcpyAsync", "CUDA_SUCCESS"))
    # Segment by segment: what is read over sockets is better copied through a ring.
    assert copies >= 3 * _NBYTES // (256 << 10)


def test_another_process_opens_the_memory_and_serves_it(major: int) -> None:
    owner = _COMMON.format(nbytes=_NBYTES, tls="") + _OWNER
    with (
        program(major, owner) as owns,
        program(major, _source(_OPENED)) as there,
        program(major, _reader("VRAM")) as here,
    ):
        assert there.process.stdin is not None
        there.process.stdin.write(owns.read() + "\n")
        there.process.stdin.flush()
        _reads(there, here, "VRAM")


def test_without_its_module_device_memory_is_refused(major: int) -> None:
    with program(major, _source(tls="tcp")) as there:
        assert there.read() == "refused"
        assert int(there.ask("")) == _NBYTES


@pytest.mark.parametrize(
    ("kind", "error"), [("VRAM", "nixlBackendError"), ("host", "nixlRemoteDisconnectError")]
)
def test_a_reader_without_its_module_gets_an_error(major: int, kind: str, error: str) -> None:
    with program(major, _source()) as there, program(major, _reader(kind, tls="tcp")) as here:
        assert here.ask(there.read()) == error
        assert int(there.ask("")) == _NBYTES


def test_a_copy_that_fails_ends_the_process(major: int) -> None:
    failing = "cuMemcpyAsync:3:CUDA_ERROR_LAUNCH_FAILED"
    with program(major, _source(), FAIL=failing) as there, program(major, _reader("VRAM")) as here:
        assert here.ask(there.read()) == "nixlRemoteDisconnectError"
        assert there.process.wait() == -signal.SIGABRT


def test_a_reader_that_leaves_ends_the_process(major: int) -> None:
    """So the agent of device memory does not live in the process that owns the memory."""
    nbytes = 64 << 20
    with (
        program(major, _source(nbytes=nbytes), LATE_US=5000) as there,
        program(major, _reader("pinned", leaves=True, nbytes=nbytes)) as here,
    ):
        assert here.ask(there.read()) == "left"
        assert there.process.wait() == -signal.SIGABRT


def test_what_ucx_asks_of_the_driver(major: int) -> None:
    passes(
        major,
        """
context = use()
assert int(call("cuCtxGetCurrent")) == int(context) and int(call("cuCtxGetDevice")) == 0
before = call("cuCtxGetId", context)
address, names = alloc(MIB), driver.CUpointer_attribute
asked = [names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, names.CU_POINTER_ATTRIBUTE_BUFFER_ID]
assert call("cuPointerGetAttributes", 2, asked, address + 5)[0] == 2
assert call("cuPointerGetAttributes", 2, asked, 4096) == [0, 0]
sent, got = bytearray(b"weights"), bytearray(7)
import ctypes
where = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (sent, got)]
call("cuMemcpyAsync", address, where[0], 7, 0)
call("cuMemcpyAsync", where[1], address, 7, 0)
assert got == sent
call("cuDevicePrimaryCtxRelease", 0)
assert attempt("cuCtxGetId", context) == "INVALID_CONTEXT"
use()
assert call("cuCtxGetId", context) != before
""",
    )
