"""KV blocks of a small model, and processes that list and read them."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mx import config, keyfile, namekey
from mx.errors import MxError
from mx.kv import BlockNames, KvFiles, KvKey, KvMemory, KvPool, KvReader, proof
from mx.kv.fetch import KvFetch
from tests.support import forkserver
from tests.support.commands import environment

LAYERS, SLOTS, HEADS, TOKENS, SIZE = 4, 32, 4, 8, 16
NAME, IDENTITY = "tiny", b"i" * 32
FORM = KvKey("test", "1", "f32", "2,b,h,t,d", TOKENS, LAYERS, HEADS, SIZE)
TIMEOUT_S = 60.0

Tensors = list[np.ndarray[Any, Any]]


def tensors(seed: int = 0, heads: int = HEADS, first: int = 0, slots: int = SLOTS) -> Tensors:
    """Return a KV cache of some of the heads: zeros for seed 0, else numbers by the seed."""
    shape = (2, slots, HEADS, TOKENS, SIZE)
    random = np.random.default_rng(seed)
    whole = [
        random.standard_normal(shape, np.float32) if seed else np.zeros(shape, np.float32)
        for _ in range(LAYERS)
    ]
    return [np.ascontiguousarray(each[:, :, first : first + heads]) for each in whole]


def memory(cache: Tensors, first: int = 0) -> KvMemory:
    return KvMemory.of(cache, 1, 2, first)


def settings(key: Path | str, **more: Any) -> config.Settings:
    """Return those of a process that has this key file alone."""
    name = "lender_key" if "lender" in Path(key).name else "name_key"
    given = {"name_key": "", name: str(key), "connect_timeout_s": 10, **more}
    return config.load(given, environ={})


def names(
    given: config.Settings, count: int, *shared_with: str, form: KvKey = FORM, first: int = 0
) -> list[bytes]:
    """Return the names of the blocks of a prompt, whose first token this is."""
    secret = proof.secret_of(namekey.load(given), NAME)
    return BlockNames(secret, IDENTITY, form, *shared_with).of(range(first, first + count * TOKENS))


def key_file(folder: Path, name: str = "name.key") -> Path:
    path = folder / name
    keyfile.make(path)
    return path


def until(found: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Return what this finds, once it finds something."""
    until_s = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return value


def fetched(reader: KvReader, wanted: Sequence[tuple[bytes, int]]) -> KvFetch:
    fetch = reader.fetch(wanted)
    assert fetch.wait(TIMEOUT_S)
    return fetch


def same(own: Tensors, theirs: Tensors, slots: Sequence[tuple[int, int]]) -> bool:
    """Return True if each of (own slot, their slot) has the same bytes."""
    pairs = [(a[:, s], b[:, t]) for a, b in zip(own, theirs, strict=True) for s, t in slots]
    return all((a == b).all() for a, b in pairs)


class Listing:
    """A pool whose slots hold what `tensors` of its seed has, and its blocks."""

    def __init__(
        self,
        key: Path | str,
        seed: int = 1,
        count: int = 20,
        *,
        heads: int = HEADS,
        first: int = 0,
        kind: type[KvPool] = KvPool,
        form: KvKey = FORM,
        shared_with: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Open it, and list so many blocks."""
        self.settings = given = settings(key, **more)
        self.cache = tensors(seed, heads, first)
        self.pool = kind.open(NAME, form, memory(self.cache, first), settings=given)
        self.names = names(given, count, *shared_with, form=form)
        self.slots = self.pool.take(count)
        before = [b"", *self.names]
        for block, slot, after in zip(self.names, self.slots, before, strict=False):
            self.pool.publish(block, slot, after=after)

    @property
    def endpoint(self) -> str:
        return self.pool.endpoint

    def keep(self, folder: Path | str, most_bytes: int = 1 << 30) -> KvFiles:
        """Keep all blocks in files, and return what does so."""
        files = KvFiles(self.pool, folder, most_bytes, settings=self.settings)
        for block in self.names:
            files.keep(block)
        return files

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


class Taking:
    """A reader with memory of its own."""

    def __init__(
        self,
        key: Path | str,
        *peers: str,
        form: KvKey = FORM,
        heads: int = HEADS,
        first: int = 0,
        transport: str | None = None,
        coordinator: str | None = None,
        files: Sequence[Path | str] = (),
        **more: Any,
    ) -> None:
        given = settings(key, **more)
        self.cache = tensors(0, heads, first)
        self.reader = KvReader.open(
            NAME,
            form,
            memory(self.cache, first),
            peers=peers,
            files=files,
            transport=transport,
            coordinator=coordinator,
            settings=given,
        )
        self.names = names(given, 40, form=form)
        #: What `loop` found, until it is `ending`.
        self.ending = False
        self.right = self.missed = self.mistaken = 0

    def loop(self, count: int) -> None:
        """Fetch the blocks that there are of the first ones, whose elements say which they are, and
        compare all that did not fail."""
        while not self.ending:
            there = [at for at in range(count) if self.reader.found(self.names[at : at + 1])]
            if not there:
                time.sleep(0.01)
                continue
            wanted = [(self.names[at], slot) for slot, at in enumerate(there[:SLOTS])]
            failed = fetched(self.reader, wanted).failed
            for slot, at in enumerate(there[:SLOTS]):
                if self.names[at] in failed:
                    self.missed += 1
                    continue
                said = (each[:, slot] == 1000 * at + n for n, each in enumerate(self.cache))
                right = all(each.all() for each in said)
                self.right += right
                self.mistaken += not right

    def finds(self, count: int) -> bool:
        """Wait for the first blocks; return whether they can be read."""
        return self.reader.wait_for(self.names[:count], TIMEOUT_S) == count

    def fetch(self, count: int) -> list[bytes]:
        """Read the first blocks into the first slots, in order; return what failed."""
        return sorted(fetched(self.reader, self.wanted(count)).failed)

    def fetch_one(self, block: bytes) -> set[bytes]:
        """Read a block into the first slot; return what failed."""
        return set(fetched(self.reader, [(block, 0)]).failed)

    def wanted(self, count: int) -> list[tuple[bytes, int]]:
        return [(block, slot) for slot, block in enumerate(self.names[:count])]

    def has(self, theirs: Tensors, slots: Sequence[int]) -> bool:
        return same(self.cache, theirs, list(enumerate(slots)))

    @property
    def wrong(self) -> int:
        """How many blocks had other bytes than their pools said."""
        return sum(each.wrong for each in self.reader._peers.values())

    def why(self) -> str:
        """Return what the reader says of its only pool."""
        (why,) = self.reader.peers().values()
        return why

    def refused(self, *words: str) -> None:
        """Wait until the reader says so of its only pool."""
        until(lambda: all(each in self.why() for each in words))

    def __enter__(self) -> Taking:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


class KvChild:
    """A process that evaluates expressions, with this module's names and what it has kept."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def ask(self, expression: str) -> Any:
        self._process.stdin.write(expression.replace("\n", " ") + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        found = json.loads(line)
        assert not isinstance(found, dict) or "error" not in found, found["error"]
        return found

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Have it run no more until SIGCONT."""
        self.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def ends(self) -> int:
        """Have it end as programs do, and return its exit code."""
        self._process.stdin.close()
        return int(self._process.wait(TIMEOUT_S))

    def wait(self) -> int:
        return int(self._process.wait(TIMEOUT_S))


def serve_expressions() -> None:
    """Be such a process."""
    scope = dict(globals())
    for line in sys.stdin:
        try:
            answer = eval(line, scope)
        except MxError as error:
            answer = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = {"error": repr(error)}
        if not isinstance(answer, str | int | float | list | dict | None):
            answer = None
        print(json.dumps(answer), flush=True)


@contextmanager
def kv_child() -> Iterator[KvChild]:
    """A process of its own, killed in the end."""
    code = "from tests.support.kv_blocks import serve_expressions; serve_expressions()"
    process = forkserver.python(code, env=environment())
    with process:
        try:
            yield KvChild(process)
        finally:
            process.kill()


def other_form(**changes: Any) -> KvKey:
    return replace(FORM, **changes)
