"""Tells whether an engine used a cache, by the objects that it did not have to make and not by hit
counters alone.

Counters are of one process, and count a hit where the compiler runs again all the same: an object's
key has more in it than its graph's. So a cache is `used` only if the counters hit and no new object
appeared in its folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mx.artifacts.caches import COMPONENTS
from mx.core.json_bounds import check_json
from mx.core.variant import Difference
from mx.text import listed, plain
from mx.units import MIB

USED, PARTLY, UNUSED = "used", "partly", "unused"

#: What engines write before they compile, and what is of no use to others.
_NO_OBJECT = re.compile(r".*\.(py|cpp|c|cu|h|hpp|json|txt|pyc|lock|tmp)|lock")
#: Native code, which is made anew only by compiling it.
_NATIVE = re.compile(r".*\.(so|o|a|gch|cubin|hsaco|ptx)")
_FACTORS = "cache_key_factors.json"
_FACTORS_BYTES = MIB
_MOST_SETS_OF_FACTORS = 256
_VALUE_CHARS = 200
_HITS = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))
_MISSES = tuple(
    (part, f"{cache}_{kind}")
    for part, cache in (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
    for kind in ("miss", "bypass", "guard_miss")
)
_VLLM_HITS = ("num_compiled_artifacts_loaded", "num_aot_artifacts_loaded")
_VLLM_MISSES = ("num_inductor_compiles", "num_aot_compiles")


@dataclass(frozen=True, slots=True)
class Usage:
    """Whether a cache was used, and the figures that show it.

    Attributes:
        state: "used", "partly" or "unused".
        hits: The hits that torch.compile and vLLM have counted in this process.
        misses: The misses that they have counted.
        counted: Whether these counters moved at all; they do not if the engine's compiler runs in
            another process, and then a cache is never `used`, at best `partly`.
        new_objects: How many objects have appeared in the folders since, made by any process.
        opened: How many of the first objects any process has read since; -1 if the file system does
            not record times of access.
        objects: How many objects there were at first.
        differences: The factors of vLLM's key that differ from those of the cache, ours first.
        text: All this on one line.
    """

    state: str
    hits: int
    misses: int
    counted: bool
    new_objects: tuple[str, ...]
    opened: int
    objects: int
    differences: tuple[Difference, ...]
    text: str


class CacheWatch:
    """Watches one cache's folder from its making on. Make it before the engine compiles."""

    def __init__(self, root: Path) -> None:
        """
        Args:
            root: The cache's folder, laid out.
        """
        self._root = root
        self._before = _unread(root, _objects(root))
        self._factors = _factors(root)
        self._hits, self._misses = _counts()

    def report(self) -> Usage:
        """Return the use so far. May be called repeatedly."""
        now = _objects(self._root)
        new = tuple(sorted(
            path for path, seen in now.items()
            if path not in self._before
            or (_NATIVE.fullmatch(path) and seen.made != self._before[path].made)
        ))  # fmt: skip
        timed = _keeps_times(self._root)
        opened = sum(
            path in now and now[path].read_ns != seen.read_ns for path, seen in self._before.items()
        )
        hits, misses = _counts()
        hits, misses = hits - self._hits, misses - self._misses
        counted = bool(hits or misses)
        if hits and not misses and not new:
            state = USED
        else:
            state = PARTLY if hits or (not counted and timed and opened) else UNUSED
        differ = _nearest(self._factors, _factors(self._root))
        text = _text(state, hits, misses, counted, new, opened if timed else -1, len(self._before))
        if differ:
            named = [f"{each.field} is {each.first or 'absent'} here, {each.second or 'absent'} "
                     "there" for each in differ]  # fmt: skip
            text += f"; factors of vLLM's key differ: {listed(named)}"
        return Usage(
            state, hits, misses, counted, new,
            opened if timed else -1, len(self._before), differ, text,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ObjectFile:
    made: tuple[int, int, int]
    read_ns: int


def _text(
    state: str, hits: int, misses: int, counted: bool, new: tuple[str, ...], opened: int, of: int
) -> str:
    said = [f"{hits} hits, {misses} misses" if counted else "no counters in this process"]
    said.append(f"{len(new)} new objects ({listed(new, 2)})" if new else "no new object")
    said.append(f"{opened} of {of} objects read" if opened >= 0 else f"{of} objects")
    return plain(f"{state}: {', '.join(said)}")


def _keeps_times(root: Path) -> bool:
    try:
        return not os.statvfs(root).f_flag & os.ST_NOATIME
    except OSError:
        return False


def _objects(root: Path) -> dict[str, _ObjectFile]:
    found: dict[str, _ObjectFile] = {}
    for part in COMPONENTS:
        for at, folders, names in os.walk(root / part):
            if "locks" in folders:
                folders.remove("locks")
            for name in names:
                if _NO_OBJECT.fullmatch(name):
                    continue
                path = os.path.join(at, name)
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue  # a temporary file
                made = status.st_ino, status.st_size, status.st_mtime_ns
                found[os.path.relpath(path, root)] = _ObjectFile(made, status.st_atime_ns)
    return found


def _unread(root: Path, objects: dict[str, _ObjectFile]) -> dict[str, _ObjectFile]:
    """Set the times of access back, since most file systems note only the first after a change."""
    found = {}
    for path, seen in objects.items():
        with contextlib.suppress(OSError):
            os.utime(root / path, ns=(seen.made[2], seen.made[2]))
            seen = _ObjectFile(seen.made, seen.made[2])
        found[path] = seen
    return found


def _counts() -> tuple[int, int]:
    """Return the hits and misses that the modules which this process has imported have counted."""
    hits = misses = 0
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(dynamo, "counters", {})
    for part, name in _HITS:
        hits += counters.get(part, {}).get(name, 0)
    for part, name in _MISSES:
        misses += counters.get(part, {}).get(name, 0)
    vllm = getattr(sys.modules.get("vllm.compilation.counter"), "compilation_counter", None)
    hits += sum(getattr(vllm, name, 0) for name in _VLLM_HITS)
    misses += sum(getattr(vllm, name, 0) for name in _VLLM_MISSES)
    return hits, misses


def _factors(root: Path) -> dict[str, dict[str, str]]:
    """Return the factors of vLLM's keys, by the path of the file that has them."""
    found: dict[str, dict[str, str]] = {}
    keys = root / "vllm" / "torch_compile_cache"
    for path in sorted([*keys.glob(f"*/rank_*/{_FACTORS}"), *keys.glob(f"*/rank_*/*/{_FACTORS}")]):
        factors = _read_factors(path)
        if factors and len(found) < _MOST_SETS_OF_FACTORS:
            found[str(path.relative_to(root))] = factors
    return found


def _read_factors(path: Path) -> dict[str, str]:
    """Return the factors in a file; {} if it is malformed: they only explain."""
    try:
        with path.open("rb") as opened:
            data = opened.read(_FACTORS_BYTES + 1)
        if len(data) > _FACTORS_BYTES:
            return {}
        check_json(data, most_nbytes=64 * _FACTORS_BYTES)
        read = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(read, dict):
        return {}
    flat: dict[str, object] = {}
    for name, value in read.items():
        if isinstance(value, dict):
            flat.update((f"{name}.{each}", what) for each, what in value.items())
        else:
            flat[name] = value
    return {
        plain(name)[:_VALUE_CHARS]: plain(str(value))[:_VALUE_CHARS] for name, value in flat.items()
    }


def _nearest(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> tuple[Difference, ...]:
    """Return the differences of a new key's factors from those of the shipped key, of the same rank
    and part of the model, that is nearest to it."""
    found: list[tuple[Difference, ...]] = []
    for path in sorted(now.keys() - before.keys()):
        ours = now[path]
        candidates = [
            theirs for other, theirs in before.items()
            if other.split("/")[3:] == path.split("/")[3:]
        ]  # fmt: skip
        found += [
            tuple(
                Difference(name, ours.get(name, ""), theirs.get(name, ""))
                for name in sorted(ours.keys() | theirs.keys())
                if ours.get(name, "") != theirs.get(name, "")
            )
            for theirs in candidates
        ]
    return min(found, key=len, default=())
