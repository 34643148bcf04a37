"""A pull whose model changes meanwhile: whatever it gives afterwards is of one revision."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mx import api
from mx.errors import ClosedError, RevisionChangedError
from mx.units import MIB
from tests.support.commands import commands, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LAYERS = 12
NAMES = [f"model.layers.{layer}.mlp.weight" for layer in range(LAYERS)]
#: Slow enough for a change in the middle of a pull, which waits for its first layers.
SLOW = "4MB/s"


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with commands() as run:
        yield start_coordinator(run)[0]


def tensors(version: int, kept: int = 0) -> dict[str, torch.Tensor]:
    """Each byte says which version it is of; so many layers are the same in all."""
    return {
        name: torch.full((MIB,), 9 if layer >= LAYERS - kept else version, dtype=torch.uint8)
        for layer, name in enumerate(NAMES)
    }


def versions(found: dict[str, torch.Tensor]) -> set[int]:
    return {value for tensor in found.values() for value in set(tensor.numpy().tobytes())}


def into(kind: str | None) -> dict[str, Any]:
    if kind == "tensors":
        return {"into": tensors(0)}
    return {} if kind is None else {"into": memoryview(bytearray(LAYERS * MIB + (1 << 16)))}


def look(pull: api.Pull, how: str) -> tuple[api.LayerEvent, dict[str, torch.Tensor]]:
    """Wait for a layer, and look at it or not; return its event and what was seen."""
    event = next(pull.layers())
    if how == "event":
        return event, event.tensors()
    return event, pull.layer_state_dict(event.index) if how == "layer" else {}


@pytest.mark.parametrize(
    ("how", "hold", "kind"),
    [
        # Each waits for a slow source; these have each way to look, and each memory, with and
        # without a hold.
        ("event", False, None),
        ("layer", True, None),
        ("nothing", False, "tensors"),
        ("event", True, "tensors"),
        ("layer", False, "buffer"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("event", True, None),
                ("event", False, "tensors"),
                ("event", False, "buffer"),
                ("layer", False, None),
                ("layer", False, "tensors"),
                ("layer", True, "tensors"),
                ("nothing", False, None),
                ("nothing", True, None),
                ("nothing", True, "tensors"),
                ("nothing", False, "buffer"),
            ]
        ),
    ],
)
def test_what_a_pull_gives_is_of_the_revision_that_it_reports(
    coordinator: str, how: str, hold: bool, kind: str | None
) -> None:
    lent = tensors(1, kept=2)
    own, model = into(kind), f"m-{how}-{hold}-{kind}"
    with (
        api.serve(
            lent, model=model, coordinator=coordinator, copy=False, max_bandwidth=SLOW
        ) as source,
        api.pull(
            model, coordinator=coordinator, follow=True, hold=hold, wait_s=30, attach=False, **own
        ) as pull,
    ):
        event, seen = look(pull, how)
        before = {name: tensor.clone() for name, tensor in seen.items()}
        with source.changing(NAMES[: LAYERS - 2]):
            for name in NAMES[: LAYERS - 2]:
                lent[name].fill_(2)
        report = pull.wait(90)
        assert report.model == str(source.model)
        assert pull.model == source.model
        assert pull.manifest is not None
        assert pull.manifest.ref.identity.hex() == source.identity_hex
        for name, tensor in pull.state_dict().items():
            assert torch.equal(tensor, lent[name]), name
        for layer in range(LAYERS):
            for name, tensor in pull.layer_state_dict(layer).items():
                assert torch.equal(tensor, lent[name]), name
        if kind is None:  # what was seen is the caller's, and keeps its bytes
            assert all(torch.equal(tensor, before[name]) for name, tensor in seen.items())
            layout = pull.manifest.layout
            for each in layout.tensors:
                place = layout.layers[each.layer].arena_offset + each.offset
                bytes_there = pull.buffer()[place : place + each.nbytes]
                assert bytes_there == lent[each.name].numpy().tobytes()
        with pytest.raises(RevisionChangedError):
            event.tensors()
        if hold:
            with api.pull(model, peer=pull.hold().endpoint, attach=False) as other:
                for name, tensor in other.state_dict().items():
                    assert torch.equal(tensor, lent[name]), name


def checkpoint(folder: Path, version: int) -> Path:
    folder.mkdir()
    save_file(tensors(version), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"version": version}))
    return folder


@pytest.mark.parametrize("asked", ["before", "after"])
def test_the_files_are_of_the_revision_that_is_reported(
    coordinator: str, tmp_path: Path, asked: str
) -> None:
    first, second = checkpoint(tmp_path / "1", 1), checkpoint(tmp_path / "2", 2)
    model = f"files-{asked}"
    with (
        api.serve(first, model=model, coordinator=coordinator, max_bandwidth=SLOW) as source,
        api.pull(model, coordinator=coordinator, follow=True, wait_s=30, attach=False) as pull,
    ):
        next(pull.layers())
        if asked == "before":
            assert json.loads(pull.files()["config.json"]) == {"version": 1}
        source.update(second, grace_s=0)
        assert pull.wait(90).model == str(source.model)
        assert versions(pull.state_dict()) == {2}
        assert json.loads(pull.files()["config.json"]) == {"version": 2}


def test_each_layer_is_reported_again_with_its_own_bytes(coordinator: str) -> None:
    """A callback sees, of each event, the bytes of the event's revision or that it is over."""
    lent = tensors(1)
    wrong, entered = list[object](), threading.Event()

    def on_layer(event: api.LayerEvent) -> None:
        try:
            found = versions(event.tensors())
        except RevisionChangedError:
            return
        expected = {1} if event.revision == str(first.revision) else {2}
        if found != expected:
            wrong.append((event.revision, event.name, found))
        entered.set()

    with api.serve(
        lent, model="c", coordinator=coordinator, copy=False, max_bandwidth=SLOW
    ) as source:
        first = source.model
        with api.pull("c", coordinator=coordinator, follow=True, wait_s=30, attach=False) as pull:
            pull.on_layer(on_layer)
            assert entered.wait(60)
            with source.changing():
                for tensor in lent.values():
                    tensor.fill_(2)
            pull.wait(90)
            assert versions(pull.state_dict()) == {2}
    assert not wrong


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", [None, "tensors"])
def test_memory_that_was_given_back_is_not_held_again(
    coordinator: str, kind: str | None, closed: bool
) -> None:
    lent, model = tensors(3), f"r-{kind}-{closed}"
    with (
        api.serve(lent, model=model, coordinator=coordinator, copy=False),
        api.pull(model, coordinator=coordinator, hold=True, **into(kind)) as pull,
    ):
        source = pull.hold()
        assert pull.hold() is source
        if closed:
            source.close()
            with pytest.raises(ClosedError):
                pull.hold()
        pull.release()
        with pytest.raises(ClosedError):
            pull.hold()
        assert versions(pull.state_dict()) == {3}
