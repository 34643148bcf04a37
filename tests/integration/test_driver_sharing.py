"""The stand-in driver between processes: legacy handles and descriptors."""

from __future__ import annotations

from tests.support.driver.programs import each_major, passes, program

pytestmark = each_major

#: Prints a legacy handle of 1 MiB full of 1; then fills it with what it reads, "" frees it.
_EXPORTER = """
import ctypes
use({ordinal})
before = alloc(1000)
address = alloc(MIB)
fill(address, 1, MIB)
handle = call("cuIpcGetMemHandle", address)
print(ctypes.string_at(int(handle.getPtr()), 64).hex())
for line in sys.stdin:
    if line.strip():
        fill(address, int(line), MIB)
    else:
        call("cuMemFree", address)
    print("done")
"""

#: Opens the handle of its input; `opened` is the result of the call.
_IMPORTER = """
import ctypes
context = use({ordinal})
def read_handle():
    handle = driver.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), bytes.fromhex(input()), 64)
    return handle
handle = read_handle()
"""


def exporter(ordinal: int = 0) -> str:
    return _EXPORTER.format(ordinal=ordinal)


def importer(code: str, ordinal: int = 0) -> str:
    return _IMPORTER.format(ordinal=ordinal) + code


def test_a_legacy_handle_shares_memory(major: int) -> None:
    code = """
address = int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS))
assert int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS)) == address
assert set(fetch(address, MIB)) == {1}
assert [int(v) for v in call("cuMemGetAddressRange", address + 5)] == [address, MIB]
assert attribute("DEVICE_ORDINAL", address) == 0
assert not attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address)
assert attempt("cuIpcGetMemHandle", address) and attempt("cuMemFree", address)
print("open")
input()
assert set(fetch(address, MIB)) == {7}
call("cuIpcCloseMemHandle", address)
assert set(fetch(address, MIB)) == {7}
call("cuIpcCloseMemHandle", address)
assert attempt("cuIpcCloseMemHandle", address) == "INVALID_VALUE"
call("cuMemsetD8Async", address, 3, 1, 0)
print(attempt("cuStreamSynchronize", 0))
"""
    with program(major, exporter()) as there, program(major, importer(code)) as here:
        assert here.ask(there.read()) == "open"
        there.ask("7")
        assert here.ask("") == "ILLEGAL_ADDRESS"


def test_a_handle_does_not_open_where_it_was_made_or_after_its_memory_is_freed(major: int) -> None:
    passes(
        major,
        """
use()
handle = call("cuIpcGetMemHandle", alloc(MIB))
assert attempt("cuIpcOpenMemHandle", handle, LAZY_PEERS) == "INVALID_CONTEXT"
assert attempt("cuIpcOpenMemHandle", driver.CUipcMemHandle(), LAZY_PEERS) == "INVALID_VALUE"
""",
    )
    code = 'print(attempt("cuIpcOpenMemHandle", handle, LAZY_PEERS))'
    with program(major, exporter()) as there, program(major, importer(code)) as here:
        handle = there.read()
        there.ask("")
        assert here.ask(handle) == "INVALID_HANDLE"


def test_a_handle_opens_on_a_peer_only(major: int) -> None:
    code = """
print(error := attempt("cuIpcOpenMemHandle", handle, LAZY_PEERS), flush=True)
if not error:
    address = int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS))
    print(attribute("DEVICE_ORDINAL", address), set(fetch(address, MIB)))
"""
    for peers, expected in (("all", ""), ("none", "PEER_ACCESS_UNSUPPORTED")):
        with (
            program(major, exporter()) as there,
            program(major, importer(code, 1), PEERS=peers) as here,
        ):
            assert here.ask(there.read()) == expected
            if not expected:
                assert here.read() == "0 {1}"


def test_memory_of_an_invisible_gpu(major: int) -> None:
    hide = 'os.environ["CUDA_VISIBLE_DEVICES"] = "1"\n'
    code = """
print(error := attempt("cuIpcOpenMemHandle", handle, LAZY_PEERS), flush=True)
if not error:
    address = int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS))
    print(attribute("DEVICE_ORDINAL", address), set(fetch(address, MIB)))
"""
    with program(major, exporter()) as there:
        handle = there.read()
        for settings, expected in (
            ({"HIDDEN_REFUSED": True}, "INVALID_HANDLE"),
            ({"PEERS": "none"}, "PEER_ACCESS_UNSUPPORTED"),
        ):
            with program(major, hide + importer(code), **settings) as here:
                assert here.ask(handle) == expected
        with program(major, hide + importer(code)) as here:
            assert here.ask(handle) == ""
            assert here.read() == "-2 {1}"


def test_small_allocations_share_a_block_which_an_opener_sees(major: int) -> None:
    code = """
address = int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS))
base, nbytes = map(int, call("cuMemGetAddressRange", address))
print(nbytes, address - base, set(fetch(address, 4)), set(fetch(base, 4)), flush=True)
call("cuIpcCloseMemHandle", address)
"""
    small = exporter().replace("MIB", "4096")
    with (
        program(major, small, SMALL_IN_BLOCKS=True) as there,
        program(major, importer(code)) as here,
    ):
        assert here.ask(there.read()) == f"{2 << 20} 1536 {{1}} {{165}}"


def test_two_allocations_of_one_block_are_opened_each(major: int) -> None:
    both = """
import ctypes
use()
for value in (3, 4):
    address = alloc(5000)
    fill(address, value, 5000)
    print(ctypes.string_at(int(call("cuIpcGetMemHandle", address).getPtr()), 64).hex())
sys.stdin.read()
"""
    code = """
print("more", flush=True)
opened = [int(call("cuIpcOpenMemHandle", h, LAZY_PEERS)) for h in (handle, read_handle())]
print([set(fetch(address, 5000)) for address in opened])
"""
    with (
        program(major, both, SMALL_IN_BLOCKS=True) as there,
        program(major, importer(code)) as here,
    ):
        assert here.ask(there.read()) == "more"
        assert here.ask(there.read()) == "[{3}, {4}]"


def test_an_exporter_that_is_killed(major: int) -> None:
    code = """
address = int(call("cuIpcOpenMemHandle", handle, LAZY_PEERS))
assert set(fetch(address, MIB)) == {1}
print("open", flush=True)
input()
call("cuMemsetD8Async", address, 3, 1, 0)
print(attempt("cuStreamSynchronize", 0))
"""
    for settings, expected in (({}, ""), ({"EXPORTER_DEATH": True}, "ILLEGAL_ADDRESS")):
        with (
            program(major, exporter()) as there,
            program(major, importer(code), **settings) as here,
        ):
            assert here.ask(there.read()) == "open"
            there.kill()
            assert here.ask("") == expected


def test_a_descriptor_shares_virtual_memory_and_outlives_its_exporter(major: int) -> None:
    export = """
use()
v = Vmm(4 * MIB)
v.allow()
fill(v.address, 5, 4 * MIB)
fd = v.export()
v.close()
print(f"/proc/{os.getpid()}/fd/{fd}")
sys.stdin.read()
"""
    code = """
use()
fd = os.open(input(), os.O_RDWR)
v = Vmm(4 * MIB, fd)
os.close(fd)
v.allow()
print(set(fetch(v.address, 4 * MIB)), attribute("DEVICE_ORDINAL", v.address))
input()
print(set(fetch(v.address, 4 * MIB)), call("cuMemGetInfo")[0] == call("cuMemGetInfo")[1])
"""
    hidden = 'os.environ["CUDA_VISIBLE_DEVICES"] = "1"\n' + code
    with program(major, export) as there, program(major, code) as here:
        descriptor = there.read()
        with program(major, hidden) as beside:
            assert beside.ask(descriptor) == "{5} -2"
        with program(major, hidden, HIDDEN_REFUSED=True) as beside:
            assert not beside.process.communicate(descriptor + "\n")[0]
        assert here.ask(descriptor) == "{5} 0"
        there.kill()
        assert here.ask("") == "{5} True"


def test_what_is_no_descriptor_of_device_memory_is_refused(major: int) -> None:
    code = """
use()
fd_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
for fd in (os.memfd_create("other"), os.open("/dev/null", os.O_RDWR), 9999):
    print(attempt("cuMemImportFromShareableHandle", fd, fd_type))
"""
    assert passes(major, code) == ["INVALID_VALUE"] * 3
