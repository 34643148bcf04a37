"""What tells builds of a library apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from mx.errors import ConfigError
from mx.graphs.eager import EagerCall, identified, identify, library_differences
from tests.support.driver.build import compiler
from tests.support.libraries import library

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


@needs_compiler
def test_a_build_is_its_id_and_its_kernels(tmp_path: Path) -> None:
    found = identify(library(tmp_path / "libone.so", "0xabcd"))
    assert (found.name, found.build_id) == ("libone.so", "abcd")
    assert found.fatbin == blake3(b"kernels\0").digest()
    assert identify(library(tmp_path / "none.so", "0xabcd", "")).fatbin == blake3().digest()
    # Another build in the same place is looked at again.
    assert identify(library(tmp_path / "libone.so", "0x0123", "others")).build_id == "0123"


@needs_compiler
def test_what_differs_is_named(tmp_path: Path) -> None:
    def run(stream: int) -> None:
        raise AssertionError(stream)

    here = library(tmp_path / "libone.so", "0xabcd")
    calls = [EagerCall("a", here, run), EagerCall("b", here, run)]
    libraries, named = identified(calls)
    assert len(libraries) == 1 and [call.library for call in named] == [0, 0]
    assert library_differences(libraries, named, calls) == []
    (missing,) = library_differences(libraries, named, calls[:1])
    assert (missing.field, missing.first, missing.second) == ("call b", "libone.so", "")
    (tmp_path / "other").mkdir()
    other = library(tmp_path / "other" / "libone.so", "0xef", "others")
    differ = library_differences(libraries, named, [EagerCall(c.name, other, run) for c in calls])
    assert [each.field for each in differ] == ["libone.so build_id", "libone.so fatbin"]
    assert (differ[0].first, differ[0].second) == ("abcd", "ef")


@needs_compiler
def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    whole = library(tmp_path / "libone.so", "0xabcd").read_bytes()
    path = tmp_path / "spoiled.so"
    with pytest.raises(ConfigError, match="can't be read"):
        identify(path)
    for data in (b"#!/bin/sh\n", b"\x7fELF\x01" + whole[5:], whole[:50], whole[:-100]):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="not a 64-bit library"):
            identify(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="not a 64-bit library"):
        identify(path)
    library(path, "none")
    with pytest.raises(ConfigError, match="no build id"):
        identify(path)
