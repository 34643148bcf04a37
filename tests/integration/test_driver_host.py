"""The stand-in driver's host memory: what is registered, and how its bytes are moved."""

from __future__ import annotations

import signal

import pytest

from tests.support.driver.programs import each_major, finish, passes

pytestmark = each_major

#: A sealed memory file of 1 MiB, mapped shared to be read only at `at`; and another one at `to`
#: that can be written. `g` is a GPU's memory.
_MEMORY = """
import ctypes, fcntl, mmap
from mx.buffers import address_of, map_shared
use()
data = os.urandom(MIB)
def file():
    made = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(made, data)
    return made
sealed = file()
fcntl.fcntl(sealed, 1033, 14)  # SHRINK, GROW, WRITE
view = map_shared(sealed, MIB)
written = mmap.mmap(file(), MIB)
at, to = address_of(view), address_of(memoryview(written))
g, s = alloc(MIB), stream()
READ_ONLY = PORTABLE | 8
def register(address, nbytes, flags):
    return attempt("cuMemHostRegister", address, nbytes, flags)
"""


def test_read_only_memory_needs_the_flag(major: int) -> None:
    code = (
        _MEMORY
        + """
print(register(at, MIB, PORTABLE), register(at, MIB, READ_ONLY), register(at, 1, READ_ONLY))
call("cuMemcpyHtoDAsync", g, at, MIB, s)
call("cuStreamSynchronize", s)
assert fetch(g, MIB) == data
call("cuMemcpyDtoHAsync", at, g, MIB, s)
print(attempt("cuStreamSynchronize", s))
"""
    )
    assert passes(major, code) == [
        "INVALID_VALUE  HOST_MEMORY_ALREADY_REGISTERED",
        "ILLEGAL_ADDRESS",
    ]
    code = _MEMORY + "print(register(at, MIB, READ_ONLY), register(to, MIB, PORTABLE))"
    assert passes(major, code, NO_READ_ONLY=True) == ["NOT_SUPPORTED "]


def test_a_copy_does_not_cross_the_end_of_a_registration(major: int) -> None:
    lines = passes(
        major,
        _MEMORY
        + """
half = MIB // 2
print(register(at, half, READ_ONLY), register(at + half, half, READ_ONLY))
print(attempt("cuMemcpyHtoDAsync", g, at, half + 1, s))
print(attempt("cuMemcpyHtoDAsync", g, at + half, half, s))
call("cuStreamSynchronize", s)
""",
    )
    assert lines == [" ", "INVALID_VALUE", ""]


def test_so_much_can_be_registered_as_a_setting_says(major: int) -> None:
    code = """
half = MIB // 2
print(register(at, half, READ_ONLY), register(to, MIB, PORTABLE), register(to, half, PORTABLE))
call("cuMemHostUnregister", at)
print(register(at, half, READ_ONLY))
"""
    lines = passes(major, _MEMORY + code, LOCK_BYTES=1 << 20)
    assert lines == [" OUT_OF_MEMORY ", ""]


_MOVED = """
call("cuMemHostRegister", at, MIB, READ_ONLY)
call("cuMemHostRegister", to, MIB, PORTABLE)
fill(g, 7, MIB)
call("cuMemcpyDtoHAsync", to, g, MIB, s)
call("cuMemcpyHtoDAsync", g, at, MIB, s)
call("cuStreamSynchronize", s)
assert bytes(written) == bytes([7]) * MIB  # to be read, that is
assert fetch(g, MIB) == data
call("cuMemcpyHtoDAsync", g, to, MIB, s)
call("cuStreamSynchronize", s)
assert set(fetch(g, MIB)) == {7}
"""


@pytest.mark.parametrize("touch", ["ctypes.string_at(at, 1)", "ctypes.memset(to, 0, 1)"])
def test_the_process_may_not_touch_what_is_moved_elsewhere(major: int, touch: str) -> None:
    given_back = """
call("cuMemHostUnregister", at)
call("cuMemHostUnregister", to)
assert bytes(view) == data
ctypes.memset(to, 0, 1)
"""
    assert passes(major, _MEMORY + _MOVED + given_back, PROTECT=True) == []
    ended = finish(major, _MEMORY + _MOVED + touch, PROTECT=True)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert finish(major, _MEMORY + _MOVED + touch).returncode == 0
