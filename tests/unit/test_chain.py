"""The chain of a pull: which steps there are, what they come to, and reading stored models."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mx import config
from mx.api.chain import chain_of
from mx.core.layout import TensorSpec
from mx.core.pages import Pages
from mx.core.planner import Plan, SourcePath
from mx.core.reference import parse_reference
from mx.core.topology import Place
from mx.core.types import Layout
from mx.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    DigestError,
    NoSourceError,
    StoreError,
)
from mx.fetching.chain import Chain
from mx.fetching.options import PullOptions
from mx.fetching.report import PathReport, StepReport
from mx.fetching.stored import StoredModel, find_pages
from mx.memory.arena import HostArena
from mx.remote import hub
from mx.remote.hub import HubStore
from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.header import header_bytes
from mx.storage.hub_cache import is_hub_id
from mx.storage.load import LoadedCheckpoint, load_opened
from mx.storage.safetensors import open_checkpoint
from mx.storage.stores import DiskStore, UrlStore
from mx.stores import Opening, check_url, shown_url
from mx.transport import host_view
from mx.units import MIB
from tests.support.records import make_documents, make_record

# -- which steps there are ------------------------------------------------------------------------


def settings(**values: object) -> config.Settings:
    return config.load(values, environ={"HOME": "/nonexistent"})


def test_the_settings_name_the_stores() -> None:
    given = settings(
        checkpoint_root="/models",
        hub_id="org/{name}@v1",
        object_url="s3://bucket/{name}/{revision}",
        store_timeout_s="2s",
    )
    found = chain_of("auto", given, parse_reference("llama"), None, None)
    assert found["stores"] == (
        DiskStore(Path("/models/llama")),
        HubStore("org/llama", "v1"),
        UrlStore("s3://bucket/llama/main"),
    )
    assert found["bound"] and not found["skipped"] and found["store_timeout_s"] == 2


def test_a_store_that_may_have_another_revision_is_skipped() -> None:
    given = settings(checkpoint_root="/models", hub_id="org/{name}@v1", object_url="s3://b/{name}")
    asked = parse_reference("llama:r 2")
    found = chain_of("auto", given, asked, None, None)
    assert not found["stores"]
    said = {each.step: each.reason for each in found["skipped"]}
    assert set(said) == {"disk", "hub", "objects"} and all("r 2" in why for why in said.values())
    # The weights themselves say what they are; and what a user names is meant.
    pinned = chain_of("auto", given, asked._replace(pin="ab" * 32), None, None)
    assert len(pinned["stores"]) == 3
    named = settings(hub_id="org/{name}", object_url="s3://b/{name}/{revision}")
    found = chain_of("auto", named, asked, None, "/here")
    assert found["stores"] == (
        DiskStore(Path("/here")),
        HubStore("org/llama", "r 2"),
        UrlStore("s3://b/llama/r%202"),
    )


def test_steps_that_nothing_is_set_for_are_skipped() -> None:
    found = chain_of("auto", settings(), parse_reference("llama"), None, "/here")
    assert found["stores"] == (DiskStore(Path("/here")),)
    assert {each.step: each.outcome for each in found["skipped"]} == {
        "hub": "skipped",
        "objects": "skipped",
    }
    named = chain_of("auto", settings(), parse_reference("org/llama:v2"), None, None)
    assert named["stores"] == (HubStore("org/llama", "v2"),)
    plain = chain_of("peers", settings(checkpoint_root="/x"), parse_reference("m"), None, "/here")
    assert (plain["stores"], plain["bound"]) == ((DiskStore(Path("/here")),), False)


@pytest.mark.parametrize("name", ["../m", "/etc", ".hidden", "a/../../b"])
def test_names_that_leave_a_folder_name_none(name: str) -> None:
    given = settings(checkpoint_root="/models", object_url="file:///models/{name}")
    found = chain_of("auto", given, parse_reference(name), None, None)
    assert not [each for each in found["stores"] if each.step in ("disk", "objects")]


def test_what_is_not_understood() -> None:
    model = parse_reference("m")
    with pytest.raises(ConfigError, match="peers, auto or snapshot"):
        chain_of("disk", settings(), model, None, None)
    with pytest.raises(ConfigError, match="fallback"):
        chain_of("auto", settings(), model, "/here", None)
    with pytest.raises(ConfigError, match="object_url"):
        chain_of("auto", settings(object_url="bucket/m"), model, None, None)


def test_ids_and_urls() -> None:
    assert all(map(is_hub_id, ("gpt2", "org/model-1.5_x")))
    assert not any(map(is_hub_id, ("", "../x", "a/b/c", "a b", "a--b", "-x/y", "org/..")))
    assert shown_url("s3://key:secret@bucket/a?sig=secret#x") == "s3://bucket/a"
    for url in ("s3://b/p", "gs://b", "az://b/p", "file:///p"):
        check_url(url)
    for url in ("http://host/p", "s3://", "s3://[b/p", "/folder", ""):
        with pytest.raises(ConfigError):
            check_url(url)
    assert "secret" not in repr(UrlStore("az://b/p?sig=secret"))


# -- what they come to ----------------------------------------------------------------------------

HERE, THERE = "10.0.0.1:1", "10.0.0.2:1"


def met(*, attach: bool = False) -> Chain:
    """A chain that knows a source on this host and one elsewhere."""
    chain = Chain(PullOptions("m", bound=True, skipped=(StepReport("hub", "skipped", "why"),)))
    near = replace(make_record(make_documents("w")), endpoint=HERE, place=Place(boot_id="a"))
    far = replace(near, endpoint=THERE, place=Place(boot_id="b"))
    path = SourcePath(near, "shm", 1.0, attach, "")
    chain.met(Plan((path,), (), ()), (near, far), "a")
    return chain


def outcomes(chain: Chain) -> list[tuple[str, str, int]]:
    return [(each.step, each.outcome, each.bytes) for each in chain.report()]


def test_sources_that_give_everything() -> None:
    chain = met(attach=True)
    chain.sources_gave([PathReport("shm", HERE, 5, 1.0, attached=True)], None)
    assert outcomes(chain) == [
        ("attach", "used", 5), ("host", "not needed", 0), ("peers", "not needed", 0),
        ("hub", "skipped", 0),
    ]  # fmt: skip
    chain = met()
    chain.sources_gave([PathReport("tcp", THERE, 4, 1.0), PathReport("tcp", HERE, 3, 1.0)], None)
    assert outcomes(chain)[:3] == [
        ("attach", "skipped", 0),
        ("host", "partly", 3),
        ("peers", "used", 4),
    ]


def test_sources_that_do_not() -> None:
    chain = met()
    chain.sources_gave([PathReport("tcp", THERE, 4, 1.0)], NoSourceError("gone"))
    assert outcomes(chain)[:3] == [
        ("attach", "skipped", 0), ("host", "failed", 0), ("peers", "partly", 4),
    ]  # fmt: skip


def test_why_nothing_was_attached() -> None:
    paths = [PathReport("tcp", HERE, 7, 1.0)]

    def reason(**chosen: Any) -> str:
        chain = met()
        chain.options = replace(chain.options, **chosen)
        chain.sources_gave(paths, None)
        return chain.report()[0].reason

    assert reason() == "no path attaches to memory of this host"
    assert reason(transport="tcp") == "`transport=tcp` was asked for, which does not attach here"
    assert reason(attach=False) == "`attach=False`: a copy was asked for"


def test_the_error_of_the_chain() -> None:
    chain = met()
    chain.sources_gave((), NoSourceError("gone"))
    chain.stored("disk", ConfigError("no folder", hint="name one"))
    error = chain.error(NoSourceError("gone", hint="start one"))
    assert isinstance(error, NoSourceError) and error.hint == "start one"
    steps = ["  peers: gone", "  disk: no folder (name one)", "  hub: why"]
    assert error.message.splitlines()[1:] == steps
    chain.stored("objects", CheckpointError("wrong", hint="upload it"))
    error = chain.error(NoSourceError("gone"))
    assert isinstance(error, CheckpointError) and error.hint == "upload it"


def test_each_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mx.fetching.chain"):
        met().stored("disk", CheckpointError("truncated"), 3 * MIB)
        # Of sources alone a pull's own report tells what it came to.
        alone = Chain(PullOptions("m"))
        alone.sources_gave([PathReport("tcp", THERE, 4, 1.0)], None)
    assert caplog.messages == ["step disk: partly, 3.15 MB: truncated"]


# -- reading stored models ------------------------------------------------------------------------

SIZES = [0, 1, 4095, 300_000, MIB, MIB + 1, 3 * MIB + 12345, 5 * MIB]


def write(folder: Path, *, seed: int = 0) -> dict[str, bytes]:
    """Write a checkpoint in two files, with tensors in another order than layers'."""
    generator = np.random.default_rng(seed)
    tensors = {
        f"model.layers.{len(SIZES) - number}.weight": generator.bytes(nbytes)
        for number, nbytes in enumerate(SIZES)
    }
    names = list(tensors)
    for part, some in (("a", names[::2]), ("b", names[1::2])):
        specs = [TensorSpec(name, "U8", (len(tensors[name]),)) for name in some]
        data = header_bytes(specs, None) + b"".join(tensors[name] for name in some)
        (folder / f"{part}.safetensors").write_bytes(data)
    return tensors


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    write(folder)
    return folder


def loaded_into_memory(stored: Path) -> LoadedCheckpoint[HostArena]:
    checkpoint = open_checkpoint(stored)
    return load_opened(checkpoint, lambda layout: HostArena(layout.arena_nbytes), threads=1)


@pytest.fixture(scope="module")
def content(stored: Path) -> tuple[Layout, bytes]:
    """The checkpoint's layout, and its arena's bytes."""
    loaded = loaded_into_memory(stored)
    data = bytes(host_view(loaded.arena.view))
    loaded.arena.release()
    return loaded.manifest.layout, data


@hypothesis_settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_any_pieces_are_read(stored: Path, content: tuple[Layout, bytes], cuts: list[int]) -> None:
    checkpoint = open_checkpoint(stored)
    layout, arena = content
    with memoryview(bytearray(4 * MIB + 2 * DIRECT_ALIGNMENT_BYTES)) as buffer:
        model = StoredModel(checkpoint, layout, "here")
        places = [
            (layout.layers[each.layer].arena_offset + each.offset, each.nbytes)
            for each in layout.tensors
            if each.nbytes
        ]
        pieces = []
        for place, nbytes in places:
            ends = sorted({0, nbytes, *(cut * nbytes // 1000 for cut in cuts)})
            for begin, end in itertools.pairwise(ends):
                pieces.append((place + begin, memoryview(bytearray(end - begin))))
        landed: list[int] = []
        model.read(pieces, buffer, landed.append)
        model.close()
    for place, view in pieces:
        assert view == arena[place : place + len(view)]
    assert landed == sorted(landed) and landed[-1] == layout.payload_nbytes


def test_pages_are_found(stored: Path, tmp_path: Path) -> None:
    loaded = loaded_into_memory(stored)
    manifest = loaded.manifest
    loaded.arena.release()
    model = StoredModel(open_checkpoint(stored), manifest.layout, "here")
    pages = Pages(manifest)
    find_pages(model, manifest, pages, pages.put, threads=2, cancelled=lambda: False)
    assert not pages.missing
    assert [pages.get(layer) for layer in range(len(manifest.layout.layers))] == [
        loaded.pages.get(layer) for layer in range(len(manifest.layout.layers))
    ]
    with pytest.raises(ClosedError):
        find_pages(model, manifest, Pages(manifest), pages.put, threads=1, cancelled=lambda: True)
    model.close()
    write(tmp_path, seed=1)
    other = StoredModel(open_checkpoint(tmp_path), manifest.layout, "there")
    with pytest.raises(DigestError):
        find_pages(other, manifest, Pages(manifest), pages.put, threads=1, cancelled=lambda: False)
    other.close()


def test_another_model_is_refused(stored: Path, tmp_path: Path) -> None:
    loaded = loaded_into_memory(stored)
    loaded.arena.release()
    spec = TensorSpec("model.layers.1.weight", "U8", (3,))
    (tmp_path / "model.safetensors").write_bytes(header_bytes([spec], None) + b"abc")
    with pytest.raises(CheckpointError, match="another model"):
        StoredModel(open_checkpoint(tmp_path), loaded.manifest.layout, "there")


# -- extras ---------------------------------------------------------------------------------------


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    opening = Opening(lambda: False, loop, 1.0)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"obstore.*\[objects\]"):
        UrlStore("s3://bucket/m").open(opening)
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"huggingface_hub.*\[hub\]"):
        HubStore("org/model", "main").open(opening)
    loop.close()


# -- the hub's process ----------------------------------------------------------------------------


def test_a_download_that_stands_still_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "_LEAST_STALL_S", 0.3)
    monkeypatch.setattr(hub, "_WAITED_S", 600.0)
    loop = asyncio.new_event_loop()
    store = HubStore("org/model", "main")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with (tmp_path / "said").open("w+b", buffering=0) as said:
            with pytest.raises(StoreError, match="the hub sent nothing"):
                store._wait(child, said.fileno(), Opening(lambda: False, loop, 0.3))
            with pytest.raises(ClosedError):
                store._wait(child, said.fileno(), Opening(lambda: True, loop, 600.0))
            # Another process that downloads stands still, too.
            said.write(b'not JSON\n{"waits_for": "' + bytes(tmp_path) + b'"}\n{"waits')
            with pytest.raises(StoreError, match="another process"):
                store._wait(child, said.fileno(), Opening(lambda: False, loop, 0.3))
    finally:
        child.kill()
        child.wait()
        loop.close()
