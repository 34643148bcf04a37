"""What tells builds of a library apart, and what its fatbins have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from mx.errors import ConfigError
from mx.graphs.eager import EagerCall
from mx.graphs.functions import library_differences, mapped_libraries
from mx.graphs.libraries import fatbins, identify, read_fatbin, state_of
from mx.graphs.package import Fatbin, LibraryCall
from tests.support.driver.build import compiler
from tests.support.graphs import small
from tests.support.libraries import COUNTER, HARMLESS, compressed, cubin, fatbin, library

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


def test_a_build_is_its_id_and_its_kernels(tmp_path: Path) -> None:
    found = identify(library(tmp_path / "libone.so", "0xabcd"))
    assert (found.name, found.build_id, found.version) == ("libone.so", "abcd", "")
    assert found.fatbin == blake3(b"kernels\0").digest()
    assert identify(library(tmp_path / "none.so", "0xabcd", "")).fatbin == blake3().digest()
    # Another build in the same place is looked at again.
    assert identify(library(tmp_path / "libone.so", "0x0123", "others")).build_id == "0123"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__all__ = ['a']\n__version__ = '2.11.0+cu130'\ndebug = False\n", "2.11.0+cu130"),
        ("__version__ = 5\n", ""),
        ("", ""),
    ],
)
def test_a_library_of_torch_has_its_version(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "version.py").write_text(text)
    path = library(tmp_path / "torch" / "lib" / "libtorch_cuda.so", "0xab")
    assert identify(path).version == version


def test_what_differs_is_named(tmp_path: Path) -> None:
    def run(stream: int) -> None:
        raise AssertionError(stream)

    here = library(tmp_path / "libone.so", "0xabcd")
    calls = [EagerCall("a", here, run), EagerCall("b", here, run)]
    named = tuple(LibraryCall(call.name, 0) for call in calls)
    graph = replace(small(), libraries=(identify(here),), calls=named, fatbins=())
    assert library_differences(graph, (), calls) == []
    (missing,) = library_differences(graph, (), calls[:1])
    assert (missing.field, missing.first, missing.second) == ("call b", "libone.so", "")
    (tmp_path / "other").mkdir()
    other = library(tmp_path / "other" / "libone.so", "0xef", "others")
    differ = library_differences(graph, (), [EagerCall(c.name, other, run) for c in calls])
    assert [each.field for each in differ] == ["libone.so build_id", "libone.so fatbin"]
    assert (differ[0].first, differ[0].second) == ("abcd", "ef")
    # Of a kernel of a fatbin the library itself is looked for.
    graph = replace(graph, calls=(), fatbins=(Fatbin(0, 0, 8),))
    assert library_differences(graph, [here], ()) == []
    assert [each.field for each in library_differences(graph, (), ())] == ["library libone.so"]
    assert len(library_differences(graph, [here, other], ())) == 2  # the last one is the caller's


def test_mapped_libraries_are_found() -> None:
    assert any(path.name.startswith("libc.so") for path in mapped_libraries())


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    whole = library(tmp_path / "libone.so", "0xabcd").read_bytes()
    path = tmp_path / "spoiled.so"
    with pytest.raises(ConfigError, match="can't be read"):
        identify(path)
    with pytest.raises(ConfigError, match="can't be read"):
        list(fatbins(path))
    for data in (b"#!/bin/sh\n", b"\x7fELF\x01" + whole[5:], whole[:50], whole[:-100], b""):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="not a 64-bit library"):
            identify(path)
        with pytest.raises(ConfigError, match="a form that mx does not know"):
            list(fatbins(path))
    library(path, "none")
    with pytest.raises(ConfigError, match="no build id"):
        identify(path)


def test_fatbins_are_found_one_behind_the_other(tmp_path: Path) -> None:
    one, other = fatbin(b"one"), fatbin(b"two", b"three")
    path = library(tmp_path / "libone.so", "0xab", one + bytes(16) + other)
    found = list(fatbins(path))
    assert found == [(0, one), (len(one) + 16, other)]
    assert all(read_fatbin(path, offset, len(data)) == data for offset, data in found)
    assert list(fatbins(library(tmp_path / "none.so", "0xab", ""))) == []
    spoiled = library(tmp_path / "libtwo.so", "0xab", one + b"other formats..." + other)
    with pytest.raises(ConfigError, match="a form that mx does not know"):
        list(fatbins(spoiled))


def test_variables_of_a_module_are_named() -> None:
    pytest.importorskip("triton")
    counts, plain = cubin(COUNTER, "counter"), cubin(HARMLESS, "$str")
    assert state_of(fatbin(plain), 90) == ""
    assert state_of(fatbin(counts), 90) == "counter"
    assert state_of(fatbin(plain, counts), 90) == "counter"
    assert state_of(fatbin(compressed(counts), flags=0x8011), 90) == "counter"
    assert state_of(fatbin(compressed(plain), flags=0x8011), 90) == ""
    # Of an object of a byte it is the name that says that it is empty.
    hidden = cubin(HARMLESS.replace("4cuda3std", "4mine3std"), "$str")
    assert state_of(fatbin(hidden), 90).startswith("_ZN33_INTERNAL_01")
    # The host writes constants before a kernel reads them.
    table = cubin(".visible .const .align 4 .u32 table;", "table", "const")
    assert state_of(fatbin(table), 90) == "table"


def test_a_fatbin_that_can_t_be_read_is_refused() -> None:
    body = b"\x7fELF\x02" + bytes(59)
    for data, says in {
        fatbin(body, arch=80): "no machine code for sm_90",
        fatbin(body, arch=100): "no machine code for sm_90",
        fatbin(body, kind=1): "no machine code for sm_90",
        fatbin(): "no machine code for sm_90",
        fatbin(body, flags=0x2011): "compressed in a way",
        fatbin(b"none"): "a form that mx does not know",
        fatbin(body)[:-8]: "a form that mx does not know",
    }.items():
        with pytest.raises(ValueError, match=says):
            state_of(data, 90)
    damaged = bytearray(fatbin(compressed(bytes(4096)), flags=0x8011))
    damaged[90:] = bytes(len(damaged) - 90)
    with pytest.raises(ValueError, match="damaged"):
        state_of(bytes(damaged), 90)
    # One for an older GPU of the same generation runs there.
    with pytest.raises(ValueError, match="does not know"):
        state_of(fatbin(b"none", arch=86), 89)
