"""Side files in memory: whom they are given to, and when."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mx.core.types import Manifest
from mx.errors import ClosedError, IntegrityError, PeerLostError, RevisionChangedError
from mx.fetching.events import EditionReadiness, EventLog, changed
from mx.fetching.files import DocumentCollector, SideFiles
from mx.fetching.opening import stored_files
from mx.fetching.options import PullOptions
from mx.storage.safetensors import Checkpoint, open_checkpoint
from mx.storage.stores import DiskStore
from tests.support.checkpoints import manifest_of

CONFIG = {"config.json": b"{}", "same.json": b"{}", "empty.txt": b""}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"a" * 32, b"b" * 32, b"c" * 32]),
            st.binary(max_size=40),
            st.integers(0, 40),
        ),
        max_size=20,
    ),
    st.integers(1, 7),
)
def test_a_document_is_what_was_sent_since_it_last_began(
    sent: list[tuple[bytes, bytes, int]], piece: int
) -> None:
    """Each source sends a document up to some byte; the last one's counts."""
    collector, expected = DocumentCollector(), {}
    for digest, data, cut in sent:
        for offset in range(0, max(1, min(cut, len(data))), piece):
            collector.write(digest, offset, data[:cut][offset : offset + piece])
        expected[digest] = data[:cut]
    assert collector.take() == expected
    assert collector.take() == {}


def checkpoint(folder: Path, first: int = 0) -> tuple[Checkpoint, Manifest]:
    folder.mkdir()
    save_file({"w": torch.arange(first, first + 10)}, folder / "model.safetensors")
    for path, data in CONFIG.items():
        (folder / path).write_bytes(data)
    return open_checkpoint(folder), manifest_of(folder)[0]


@pytest.mark.parametrize("others", [["CONFIG.JSON"], [f"{i:04}.txt" for i in range(1000)]])
def test_what_loaders_need_travels_whatever_else_is_there(
    tmp_path: Path, others: list[str]
) -> None:
    save_file({"w": torch.arange(3)}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"w": "././model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", *others):
        (tmp_path / name).write_bytes(b"{}")
    found = open_checkpoint(tmp_path)
    travels = [side.path for side in found.packaging.side_files]
    assert {"config.json", "model.safetensors.index.json"} <= {*travels}
    assert set(found.left_out) == {*others} - {*travels}
    # The order, which a pin covers, is that of names.
    assert travels == sorted(travels)


async def asked(files: SideFiles) -> asyncio.Task[dict[str, bytes]]:
    """Return a request that waits."""
    task = asyncio.create_task(files.get())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_they_are_there_as_soon_as_the_folder_was_opened(tmp_path: Path) -> None:
    opened, manifest = checkpoint(tmp_path / "m")
    files = SideFiles(PullOptions("m"), EditionReadiness())
    first, second = await asked(files), await asked(files)
    files.opened(opened)
    assert await first == await second == CONFIG
    files.loaded(manifest)
    (await files.get()).clear()  # the caller's own
    assert await files.get() == CONFIG
    await files.close()


async def test_with_a_pin_they_wait_for_the_weights(tmp_path: Path) -> None:
    opened, manifest = checkpoint(tmp_path / "m")
    files = SideFiles(PullOptions(f"m@{manifest.ref.pin.hex()}"), EditionReadiness())
    files.opened(opened)
    request = await asked(files)
    files.loaded(manifest)
    assert await request == CONFIG
    await files.close()


async def test_one_who_stops_waiting_takes_nothing_from_the_others(tmp_path: Path) -> None:
    opened, _ = checkpoint(tmp_path / "m")
    files = SideFiles(PullOptions("m"), EditionReadiness())
    first, second = await asked(files), await asked(files)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    files.opened(opened)
    assert await second == CONFIG
    await files.close()


async def test_each_that_waits_gets_the_error_of_the_pull() -> None:
    files = SideFiles(PullOptions("m"), EditionReadiness())
    requests = [await asked(files), await asked(files)]
    files.end(PeerLostError("it died", peer="a:1"))
    errors = await asyncio.gather(*requests, files.get(), return_exceptions=True)
    assert [str(error) for error in errors] == ["it died"] * 3
    assert len({id(error) for error in errors}) == 3
    await files.close()


async def test_closed_it_has_none(tmp_path: Path) -> None:
    files = SideFiles(PullOptions("m"), EditionReadiness())
    request = await asked(files)
    await files.close()
    with pytest.raises(ClosedError):
        await request
    opened, _ = checkpoint(tmp_path / "m")
    files = SideFiles(PullOptions("m"), EditionReadiness())
    files.opened(opened)
    assert await files.get() == CONFIG
    await files.close()
    await files.close()
    with pytest.raises(ClosedError):
        await files.get()


async def test_who_has_the_files_gets_no_other_weights(tmp_path: Path) -> None:
    log = EventLog(0.0)
    ready = log.begin_anew()
    files = SideFiles(PullOptions("m"), ready)
    (_, manifest), (_, other) = checkpoint(tmp_path / "m"), checkpoint(tmp_path / "n", 5)
    log.planned(ready, 1, manifest)
    files.loaded(manifest)
    assert await files.get() == CONFIG
    again = log.begin_again()
    assert again is not None
    with pytest.raises(IntegrityError, match=other.ref.identity.hex()):
        log.planned(again, 1, other)
    log.planned(again, 1, manifest)
    await files.close()


async def test_files_of_an_edition_that_is_over_are_not_given(tmp_path: Path) -> None:
    files = SideFiles(PullOptions("m"), EditionReadiness())
    request = await asked(files)
    files.end(changed())
    with pytest.raises(RevisionChangedError):
        await request
    files.opened(checkpoint(tmp_path / "m")[0])
    with pytest.raises(RevisionChangedError):
        await files.get()
    await files.close()


async def test_a_fallback_has_the_same_files_or_none(tmp_path: Path) -> None:
    opened, manifest = checkpoint(tmp_path / "m")
    packaging = manifest.packaging
    stores = (DiskStore(tmp_path / "nowhere"), DiskStore(tmp_path / "m"))
    options = PullOptions("m", stores=stores)
    assert await stored_files(options, packaging) == (str(tmp_path / "m"), opened.side_documents)
    asked_alone = PullOptions("m", stores=stores, from_sources=False)
    assert await stored_files(asked_alone, packaging) is None
    (tmp_path / "m" / "config.json").write_bytes(b"[]")
    assert await stored_files(options, packaging) is not None  # same.json has those bytes, too
    (tmp_path / "m" / "same.json").write_bytes(b"[]")
    assert await stored_files(options, packaging) is None
    (tmp_path / "m" / "model.safetensors").unlink()
    assert await stored_files(options, packaging) is None
