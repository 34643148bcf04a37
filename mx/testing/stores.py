"""What a store must do (`mx.stores`): a suite of rules, to be subclassed in a test module.

    from mx.testing.stores import StoreHarness, StoreSuite

    class TestMine(StoreSuite):
        @pytest.fixture
        def store_harness(self, ...) -> StoreHarness:
            return StoreHarness("mine://host/folder", files, change=..., stalled=...)

That is a test for each rule. The store is opened as mx opens it, by its URL. This module itself
needs no pytest: `check` runs one rule, `broken_rules` all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass

from mx.errors import CheckpointError, ClosedError, MxError, StoreError
from mx.remote import open_url
from mx.stores import ListedFile, Opening, WeightStore
from mx.testing.bench import GUARD, RuleBroken, require
from mx.threads import Threads
from mx.units import KIB, MIB


@dataclass
class StoreHarness:
    """A store under test: its URL, and what it holds, by path; one file has 100 KiB or more.

    `change` replaces a file's bytes, so that a later version differs; None: they can't change.
    `stalled` gives a block in which no read ends; None: none can be stalled. `secret` is the part
    of the URL that is a credential. Override `open` where the store is not found by its URL.
    """

    url: str
    files: Mapping[str, bytes]
    change: Callable[[str, bytes], None] | None = None
    stalled: Callable[[], AbstractContextManager[object]] | None = None
    secret: str = ""
    #: How long a rule waits for what must happen; nothing is timed against it.
    deadline_s: float = 15.0

    def open(self, opening: Opening) -> WeightStore:
        return open_url(self.url, opening)


class StoreBench:
    """The store, open, for one rule."""

    def __init__(
        self, harness: StoreHarness, store: WeightStore, cancelled: threading.Event
    ) -> None:
        self.harness, self.store, self.cancelled = harness, store, cancelled
        self.listed = {file.path: file for file in store.list()}
        self.random = random.Random(7)
        self.path = max(harness.files, key=lambda path: len(harness.files[path]))

    @property
    def largest(self) -> ListedFile:
        """The largest file, as it was listed."""
        require(self.path in self.listed, f"{self.path} is not listed")
        return self.listed[self.path]

    def read(self, file: ListedFile, offset: int, nbytes: int) -> bytes:
        """Return what a read writes. Raises MxError, and RuleBroken for any other error."""
        data = bytearray([GUARD]) * (nbytes + 64)
        with memoryview(data) as all_of_it, all_of_it[32 : 32 + nbytes] as view:
            try:
                came = self.store.read(file, offset, view)
            except MxError as error:
                secret = self.harness.secret
                require(not secret or secret not in str(error), "an error shows a credential")
                raise
            except Exception as error:
                raise RuleBroken(f"a read raised {type(error).__name__}: {error}") from error
        require(0 <= came <= nbytes, f"a read of {nbytes} bytes returned {came}")
        beside = bytes(data[:32] + data[32 + nbytes :])
        require(beside == bytes([GUARD]) * 64, "bytes beside the view were written")
        return bytes(data[32 : 32 + came])

    def failure(self, work: Callable[[], object]) -> MxError | None:
        """Return the error that this ends with; None if it ends without."""
        try:
            work()
        except MxError as error:
            return error
        return None

    def in_time(self, work: Callable[[], object], what: str) -> MxError | None:
        """Return as `failure` what a thread ends with. Raises RuleBroken if it does not end."""
        found: Future[MxError | None] = Future()

        def run() -> None:
            try:
                found.set_result(self.failure(work))
            except BaseException as error:  # noqa: BLE001 - it is raised below
                found.set_exception(error)

        threading.Thread(target=run, name="mx-rule", daemon=True).start()
        try:
            return found.result(self.harness.deadline_s)
        except TimeoutError:
            raise RuleBroken(f"{what} did not end") from None


def lists_files(bench: StoreBench) -> None:
    """All files are listed once, with their true sizes, and alike the next time."""
    files = list(bench.store.list())
    sizes = {file.path: file.nbytes for file in files}
    require(len(sizes) == len(files), "a file is listed twice")
    for path, data in bench.harness.files.items():
        require(path in sizes, f"{path} is not listed")
        right = sizes[path] == len(data)
        require(right, f"{path} has {len(data)} bytes, and is listed with {sizes[path]}")
    require({f.path: f for f in files} == bench.listed, "the same files are listed differently")


def right_ranges(bench: StoreBench) -> None:
    """Ranges anywhere in files arrive right, and not one byte beside them."""
    for path, data in bench.harness.files.items():
        size, file = len(data), bench.listed.get(path)
        require(file is not None, f"{path} is not listed")
        assert file is not None
        ranges = [(0, size), (0, 1), (size - 1, 1), (size // 2, size - size // 2)]
        for nbytes in (2, 511, 4096, 4097, 64 * KIB, MIB + 3):
            if nbytes < size:
                ranges.append((bench.random.randrange(size - nbytes), nbytes))
        for offset, nbytes in ranges if size else ():
            came = bench.read(file, offset, nbytes)
            what = f"{nbytes} bytes of {path} at {offset}"
            require(came == data[offset : offset + nbytes], f"{what} are wrong")


def ends_with_the_file(bench: StoreBench) -> None:
    """A read beyond a file's end returns what there is, or raises."""
    file, data = bench.largest, bench.harness.files[bench.path]
    for offset in (len(data) - 5, len(data), len(data) + 4096):
        with suppress(MxError):
            came = bench.read(file, offset, 100)
            require(len(came) <= max(0, len(data) - offset), "more was read than there is")


def refuses_short_files(bench: StoreBench) -> None:
    """Of a file that has become shorter than it was listed no more is read than there is."""
    if bench.harness.change is None:
        return
    file, data = bench.largest, bench.harness.files[bench.path]
    bench.harness.change(bench.path, data[:-1000])
    with suppress(MxError):
        came = bench.read(file, len(data) - 2000, 2000)
        require(len(came) < 2000, "bytes were read that the file has no more")


def refuses_changed_files(bench: StoreBench) -> None:
    """If the store vouches for a file's version, a file that has changed is not read."""
    file, data = bench.largest, bench.harness.files[bench.path]
    if bench.harness.change is None or not file.version:
        return
    bench.harness.change(bench.path, bytes(byte ^ 0xFF for byte in data))
    error = bench.failure(lambda: bench.read(file, 0, 4096))
    require(isinstance(error, CheckpointError), f"a read of a changed file ended with {error!r}")
    new = {each.path: each for each in bench.store.list()}[bench.path]
    require(new.version != file.version, "a file that has changed has the same version")


def reads_side_by_side(bench: StoreBench) -> None:
    """As many reads at a time as `threads` says arrive right."""
    file, data = bench.largest, bench.harness.files[bench.path]
    threads = bench.store.threads
    require(isinstance(threads, int) and 1 <= threads <= 64, f"`threads` is {threads!r}")
    step = max(1, len(data) // (4 * threads))
    offsets = range(0, len(data), step)
    with Threads(threads, "mx-rule") as pool:
        for offset, came in zip(
            offsets,
            pool.map(lambda at: bench.read(file, at, min(step, len(data) - at)), offsets),
            strict=True,
        ):
            right = came == data[offset : offset + step]
            require(right, f"reads at a time: the bytes at {offset} are wrong")


def ends_when_cancelled(bench: StoreBench) -> None:
    """A read that runs ends soon with ClosedError once the pull is closed."""
    if bench.harness.stalled is None:
        return
    file = bench.largest
    with bench.harness.stalled():
        threading.Timer(0.3, bench.cancelled.set).start()
        error = bench.in_time(lambda: bench.read(file, 0, 4096), "a cancelled read")
    require(isinstance(error, ClosedError), f"a cancelled read ended with {error!r}")


def ends_in_time(bench: StoreBench) -> None:
    """A read that gets no answer for `timeout_s` ends with StoreError."""
    if bench.harness.stalled is None:
        return
    file = bench.largest
    with bench.harness.stalled():
        error = bench.in_time(lambda: bench.read(file, 0, 4096), "a read without an answer")
    require(isinstance(error, StoreError), f"a read without an answer ended with {error!r}")


def says_what_is_missing(bench: StoreBench) -> None:
    """A read of a file that is not there raises CheckpointError."""
    gone = ListedFile("no/such.safetensors", 100, bench.largest.version)
    error = bench.failure(lambda: bench.read(gone, 0, 100))
    require(isinstance(error, CheckpointError), f"a read of no file ended with {error!r}")


def hides_credentials(bench: StoreBench) -> None:
    """`place` names the store, without a credential."""
    place, secret = bench.store.place, bench.harness.secret
    require(isinstance(place, str) and bool(place) and place.isprintable(), f"`place`: {place!r}")
    require(not secret or secret not in place, "`place` shows a credential")


def closes(bench: StoreBench) -> None:
    """Closing, repeatedly, leaves no descriptor; a read afterwards is right, or raises."""
    file, data = bench.largest, bench.harness.files[bench.path]
    with _opened(bench.harness) as (again, _):
        list(again.list())
        again.read(file, 0, memoryview(bytearray(10)))
    before = _descriptors()
    with _opened(bench.harness) as (again, _):
        list(again.list())
        again.read(file, 0, memoryview(bytearray(10)))
        again.close()
    until_s = time.monotonic() + bench.harness.deadline_s
    while (left := _descriptors() - before) and time.monotonic() < until_s:
        time.sleep(0.05)
    require(not left, f"a closed store leaves descriptors: {left}")
    bench.store.close()
    with suppress(MxError):
        require(bench.read(file, 0, 10) == data[:10], "a closed store gave wrong bytes")


def _descriptors() -> set[str]:
    """Return the files and sockets that are open, without those of event loops."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            to = os.readlink(f"/proc/self/fd/{number}")
            if not to.startswith("anon_inode:"):
                found.add(f"{number} -> {to}")
    return found


RULES: dict[str, Callable[[StoreBench], None]] = {
    rule.__name__: rule
    for rule in (
        lists_files,
        right_ranges,
        ends_with_the_file,
        refuses_short_files,
        refuses_changed_files,
        reads_side_by_side,
        ends_when_cancelled,
        ends_in_time,
        says_what_is_missing,
        hides_credentials,
        closes,
    )
}
_TIMEOUT_S = 2.0


@contextmanager
def _opened(
    harness: StoreHarness, timeout_s: float = 60.0
) -> Iterator[tuple[WeightStore, threading.Event]]:
    loop, cancelled = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever, name="mx-rule", daemon=True)
    thread.start()
    try:
        with closing(harness.open(Opening(cancelled.is_set, loop, timeout_s))) as store:
            yield store, cancelled
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def check(rule: str, harness: StoreHarness) -> None:
    """Run one rule.

    Args:
        rule: Its name, one of RULES.
        harness: How to get at the store.

    Raises:
        RuleBroken: The store does not keep the rule.
        Exception: What the store raised where it must not.
    """
    timeout_s = _TIMEOUT_S if rule == ends_in_time.__name__ else 600.0
    with _opened(harness, timeout_s) as (store, cancelled):
        RULES[rule](StoreBench(harness, store, cancelled))


def broken_rules(harness: Callable[[], StoreHarness]) -> dict[str, str]:
    """Run all rules, each with a harness of its own, and return those that are broken with what
    was seen."""
    broken = {}
    for rule in RULES:
        try:
            check(rule, harness())
        except (RuleBroken, MxError) as error:
            broken[rule] = str(error)
    return broken


class StoreSuite:
    """A test for each rule, `test_` and its name. See the module's text for how to use it."""


def _test(rule: str) -> Callable[[StoreSuite, StoreHarness], None]:
    def test(self: StoreSuite, store_harness: StoreHarness) -> None:
        check(rule, store_harness)

    test.__name__ = f"test_{rule}"
    test.__qualname__ = f"{StoreSuite.__name__}.{test.__name__}"
    test.__doc__ = RULES[rule].__doc__
    return test


for _rule in RULES:
    setattr(StoreSuite, f"test_{_rule}", _test(_rule))
