"""The stores of mx keep the rules of stores; each broken one breaks the rule it is for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from mx.errors import CheckpointError, ClosedError, StoreError
from mx.storage.stores import DiskStore
from mx.stores import ListedFile, Opening, WeightStore
from mx.testing import stores
from mx.testing.stores import StoreHarness, StoreSuite
from tests.support.web_stores import Store, bucket, rewrite, s3_environment

SECRET = "a-secret"


@pytest.fixture
def files(tmp_path: Path) -> Mapping[str, bytes]:
    """Files in tmp_path/m, the largest of which is a checkpoint that has a header."""
    header = b'{"w":{"dtype":"U8","shape":[3000000],"data_offsets":[0,3000000]}}'
    data = len(header).to_bytes(8, "little") + header + os.urandom(3_000_000)
    found = {"model.safetensors": data, "config.json": b"{}", "1_Pooling/config.json": b"{ }"}
    for path, content in found.items():
        (tmp_path / "m" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / path).write_bytes(content)
    return found


class FolderHarness(StoreHarness):
    """A store that is opened by its folder."""

    def open(self, opening: Opening) -> WeightStore:
        return DiskStore(Path(self.url))


class TestDisk(StoreSuite):
    @pytest.fixture(params=["folder", "file", "hub"])
    def store_harness(
        self, request: pytest.FixtureRequest, tmp_path: Path, files: Mapping[str, bytes]
    ) -> StoreHarness:
        place = tmp_path / "m"
        if request.param == "file":
            place /= "model.safetensors"
            files = {"model.safetensors": files["model.safetensors"]}
        elif request.param == "hub":
            place = snapshot(place, tmp_path / "hub")

        def change(path: str, data: bytes) -> None:
            (place / path if place.is_dir() else place).write_bytes(data)

        return FolderHarness(str(place), files, change=change)


def snapshot(folder: Path, cache: Path) -> Path:
    """Put a folder into a cache as Hugging Face's library does, and return its place there."""
    base = cache / "models--org--model"
    (base / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        (base / "blobs" / f"{number:040x}").write_bytes(path.read_bytes())
        link = base / "snapshots" / ("0" * 40) / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(base / "blobs" / f"{number:040x}")
    return base / "snapshots" / ("0" * 40)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The threads and descriptors that obstore makes at its first use, and keeps."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "a").write_bytes(b"a")
    stores.check("lists_files", StoreHarness(f"file://{folder}", {"a": b"a"}))


@pytest.mark.usefixtures("runtime")
class TestFileUrl(StoreSuite):
    @pytest.fixture
    def store_harness(self, tmp_path: Path, files: Mapping[str, bytes]) -> StoreHarness:
        return StoreHarness(
            f"file://{tmp_path}/m",
            files,
            change=lambda path, data: rewrite(tmp_path / "m" / path, data),
        )


@pytest.mark.usefixtures("runtime")
class TestBucket(StoreSuite):
    @pytest.fixture
    def store_harness(
        self, tmp_path: Path, files: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StoreHarness]:
        with bucket(tmp_path) as served:
            for name, value in s3_environment(served).items():
                monkeypatch.setenv(name, value)

            def change(path: str, data: bytes) -> None:
                rewrite(tmp_path / "m" / path, data)
                served.version = "second"

            yield StoreHarness(
                f"s3://models/m?sig={SECRET}",
                files,
                change=change,
                stalled=lambda: silent(served),
                secret=SECRET,
            )


@contextmanager
def silent(served: Store) -> Iterator[None]:
    """Requests get no answer any more."""
    served.serving = False
    yield


# -- the suite itself -----------------------------------------------------------------------------


class MemoryFiles:
    """Files in memory as a store, which breaks one rule, or none."""

    def __init__(self, harness: MemoryHarness, opening: Opening) -> None:
        self._harness, self._opening, self._breaks = harness, opening, harness.breaks
        self.threads = 3
        self.place = f"memory://{SECRET if self._breaks == 'hides_credentials' else 'files'}"
        self._reading = 0

    def list(self) -> Iterable[ListedFile]:
        if self._breaks == "closes":
            self._harness.left.append(os.open("/dev/null", os.O_RDONLY))
        more = self._breaks == "lists_files"
        return [
            ListedFile(path, len(data) + more, str(hash(data)))
            for path, data in self._harness.now.items()
        ]

    def read(self, file: ListedFile, offset: int, view: memoryview) -> int:
        while self._harness.is_stalled:
            if self._breaks != "ends_when_cancelled" and self._opening.cancelled():
                raise ClosedError("reading was cancelled")
            self._harness.ended.wait(0.01)
            if self._breaks != "ends_in_time" and time.monotonic() > self._harness.until_s:
                raise StoreError("no answer")
            if self._harness.ended.is_set():
                return 0
        data = self._harness.now.get(file.path)
        if data is None:
            missing: Exception = CheckpointError(f"{file.path} is gone")
            raise KeyError(file.path) if self._breaks == "says_what_is_missing" else missing
        changed = str(hash(data)) != file.version
        if len(data) < file.nbytes and self._breaks == "refuses_short_files":
            view[:] = bytes(len(view))
            return len(view)
        if changed and self._breaks != "refuses_changed_files":
            raise CheckpointError(f"{file.path} has changed")
        found = data[offset : offset + len(view)]
        if self._breaks == "ends_with_the_file" and len(found) < len(view):
            return len(view)
        if self._breaks == "right_ranges" and len(view) == 511:
            found = bytes([found[0] ^ 1])
        if self._breaks == "reads_side_by_side":
            self._reading += 1
            time.sleep(0.02)
            found = found if self._reading == 1 else bytes(len(found))
            self._reading -= 1
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Keep what was opened, as `closes` must find."""


class MemoryHarness(StoreHarness):
    def __init__(self, files: Mapping[str, bytes], breaks: str = "") -> None:
        self.now, self.breaks, self.left = dict(files), breaks, list[int]()
        self.is_stalled, self.ended, self.until_s = False, threading.Event(), 0.0
        super().__init__(
            "memory://", files, change=self.now.__setitem__, stalled=self.stall, secret=SECRET
        )
        self.deadline_s = 1.5

    def open(self, opening: Opening) -> WeightStore:
        self.timeout_s = opening.timeout_s
        return MemoryFiles(self, opening)

    @contextmanager
    def stall(self) -> Iterator[None]:
        self.is_stalled, self.until_s = True, time.monotonic() + min(self.timeout_s, 0.5)
        if self.timeout_s > 60:
            self.until_s += 600
        yield


@pytest.mark.parametrize("rule", ["", *stores.RULES])
def test_a_store_that_breaks_a_rule_breaks_it_alone(rule: str, files: Mapping[str, bytes]) -> None:
    made: list[MemoryHarness] = []

    def make() -> MemoryHarness:
        made.append(MemoryHarness(files, rule))
        return made[-1]

    try:
        assert list(stores.broken_rules(make)) == ([rule] if rule else [])
    finally:
        for harness in made:
            harness.ended.set()
            for descriptor in harness.left:
                os.close(descriptor)


def test_the_suite_has_a_test_for_each_rule() -> None:
    for rule, function in stores.RULES.items():
        test = getattr(StoreSuite, f"test_{rule}")
        assert test.__doc__ == function.__doc__ and test.__name__ == f"test_{rule}"
