"""A cache is used only if counters hit and nothing was made anew; vLLM's factors that differ."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.artifacts.usage import CacheWatch
from mx.core.variant import Difference
from mx.text import has_control

OBJECT = "inductor/ab/cab.main.so"
KEY = "vllm/torch_compile_cache/{}/rank_0_0/backbone/cache_key_factors.json"


def put(root: Path, path: str, data: bytes = b"x") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


class Counters:
    """torch's, which this process has not imported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, dict[str, int]] = {"aot_autograd": {}, "inductor": {}}
        module = ModuleType("torch._dynamo.utils")
        module.counters = self.values  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", module)

    def count(self, part: str, name: str) -> None:
        self.values[part][name] = self.values[part].get(name, 0) + 1


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    return Counters(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, OBJECT)
    put(tmp_path, "inductor/fxgraph/x/fx/entry")
    return tmp_path


def hit(counters: Counters) -> None:
    counters.count("aot_autograd", "autograd_cache_hit")
    counters.count("inductor", "fxgraph_cache_hit")


@pytest.mark.parametrize("miss", ["autograd_cache_miss", "autograd_cache_bypass", "none"])
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("hits", [True, False])
def test_used_is_hits_and_nothing_else(
    root: Path, counters: Counters, hits: bool, new: bool, miss: str
) -> None:
    counters.count("inductor", "fxgraph_cache_miss")  # before: of something else
    hit(counters)
    watch = CacheWatch(root)
    if hits:
        hit(counters)
    if miss != "none":
        counters.count("aot_autograd", miss)
    if new:
        put(root, "inductor/cd/ccd.main.so")
    found = watch.report()
    assert found.state == ("unused" if not hits else "partly" if new or miss != "none" else "used")
    assert (found.hits, found.misses) == (2 * hits, miss != "none")
    assert found.counted == (hits or miss != "none")
    assert found.new_objects == (("inductor/cd/ccd.main.so",) if new else ())
    assert found.text.startswith(found.state)
    assert ("ccd.main.so" in found.text) == new


@pytest.mark.parametrize(
    ("path", "counts"),
    [("inductor/ab/c.py", False), ("inductor/ab/c.main.cpp", False), ("inductor/locks/c", False),
     ("triton/K/k.json", False), ("triton/K/lock", False), ("inductor/ab/.1.2.tmp", False),
     ("inductor/fxgraph/y/fy/entry", True), ("triton/K/k.cubin", True), ("inductor/ab/c.o", True),
     ("vllm/torch_compile_cache/0/rank_0_0/b/artifact_compile_range_1_2", True),
     ("inductor/ab/c.best_config", True), ("inductor/ab/c.h.gch", True)],
)  # fmt: skip
def test_what_counts_as_a_new_object(
    root: Path, counters: Counters, path: str, counts: bool
) -> None:
    watch = CacheWatch(root)
    hit(counters)
    put(root, path)
    found = watch.report()
    assert found.new_objects == ((path,) if counts else ())
    assert found.state == ("partly" if counts else "used")


def test_an_object_that_was_replaced_is_new(root: Path, counters: Counters) -> None:
    watch = CacheWatch(root)
    hit(counters)
    put(root, "other", b"x")
    (root / "other").rename(root / OBJECT)
    assert watch.report().new_objects == (OBJECT,)
    assert watch.report().state == "partly"


def test_without_counters_reading_is_no_proof(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's compiler ran in another process: what it read is shown, and not believed."""
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)  # another test's
    (root / OBJECT).read_bytes()  # before: of something else
    watch = CacheWatch(root)
    found = watch.report()
    assert (found.state, found.opened, found.objects, found.counted) == ("unused", 0, 2, False)
    if os.statvfs(root).f_flag & os.ST_NOATIME:
        assert found.opened == -1
        return
    (root / OBJECT).read_bytes()
    found = watch.report()
    assert (found.state, found.opened, found.counted) == ("partly", 1, False)
    assert "1 of 2 objects read" in found.text
    assert "no counters" in found.text
    again = CacheWatch(root)  # of a second start in the same folder
    assert again.report().opened == 0
    (root / OBJECT).read_bytes()
    assert again.report().opened == 1
    assert again.report().new_objects == ()


def factors(root: Path, key: str, *, rank: str = "rank_0_0", **fields: object) -> None:
    path = KEY.format(key).replace("rank_0_0", rank)
    put(root, path, json.dumps(fields).encode())


def test_the_factor_of_vllms_key_that_differs_is_named(root: Path) -> None:
    env = {"VLLM_USE_X": True, "VLLM_Y": None}
    factors(root, "0" * 10, env=env, code_hash="a", config_hash="b", compiler_hash="c")
    factors(root, "1" * 10, env=env, code_hash="z", config_hash="z", compiler_hash="z")
    factors(root, "0" * 10, rank="rank_1_0", env={}, code_hash="far", config_hash="far")
    watch = CacheWatch(root)
    assert watch.report().differences == ()
    ours = {"VLLM_USE_X": False, "VLLM_Y": None}
    factors(root, "2" * 10, env=ours, code_hash="a", config_hash="b2", compiler_hash="c")
    found = watch.report()
    assert found.differences == (
        Difference("config_hash", "b2", "b"), Difference("env.VLLM_USE_X", "False", "True"),
    )  # fmt: skip
    assert "config_hash is b2 here, b there" in found.text


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"1", b"[" * 100_000, b'{"env": ' * 50_000, b"\xff", b'{"a": "' + b"x" * (2 << 20),
     b"{" + b",".join(b'"%d": 0' % n for n in range(100_000)) + b"}"],
)  # fmt: skip
def test_hostile_factors_explain_nothing(root: Path, text: bytes) -> None:
    watch = CacheWatch(root)
    put(root, KEY.format("0" * 10), text)
    assert watch.report().differences == ()


def test_factors_are_shown_without_control_characters(root: Path) -> None:
    factors(root, "0" * 10, code_hash="a\x1b[2J\n" + "x" * 1000)
    watch = CacheWatch(root)
    factors(root, "1" * 10, code_hash="b\u202e")
    found = watch.report()
    [differs] = found.differences
    assert differs.first == "b"
    assert len(differs.second) == 200
    assert not has_control(found.text)


JSON = st.recursive(
    st.none() | st.text(max_size=5) | st.integers(),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_compared_or_left_out(
    tmp_path_factory: pytest.TempPathFactory, read: object
) -> None:
    root = tmp_path_factory.mktemp("factors")
    put(root, KEY.format("0" * 10), json.dumps(read).encode())
    watch = CacheWatch(root)
    factors(root, "1" * 10, code_hash="x")
    found = watch.report()
    assert not has_control(found.text)
    is_read = isinstance(read, dict) and any(each != {} for each in read.values())
    assert bool(found.differences) == is_read


def test_a_folder_that_went_away_was_not_used(root: Path) -> None:
    watch = CacheWatch(root)
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert watch.report().state == "unused"
    root.rmdir()
    assert watch.report().state == "unused"
