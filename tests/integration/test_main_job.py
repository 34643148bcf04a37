"""The main job with real processes: serve, coordinate, pull."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mx import api, config
from mx.errors import ConfigError, UnknownModelError
from tests.support.commands import Run, free_port, serve, start_coordinator
from tests.support.outcomes import error_of
from tests.support.tensors import same

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("options", "transport", "verified"),
    [
        ({}, "shm-attach", "source"),
        ({"verify": "strong"}, "shm-attach", "strong"),
        ({"attach": False}, "shm", "xxh3"),
        ({"attach": False, "verify": "strong"}, "shm", "strong"),
        ({"transport": "tcp"}, "tcp", "digest"),
        ({"hold": True}, "shm", "digest"),
    ],
)
def test_a_pull_gives_the_bytes_on_disk(
    run: Run,
    coordinator: str,
    checkpoint: Path,
    options: dict[str, object],
    transport: str,
    verified: str,
) -> None:
    serve(run, checkpoint, "m", coordinator)
    with api.pull("m", coordinator=coordinator, **options) as pull:  # type: ignore[arg-type]
        report = pull.wait(30)
        tensors = pull.state_dict()
    assert same(tensors, load_file(checkpoint))
    (path,) = report.paths
    assert path.transport + ("-attach" if path.attached else "") == transport
    assert report.verified == verified
    assert report.bytes == path.bytes == sum(t.nbytes for t in tensors.values())
    assert report.layers == 10
    assert report.retries == 0
    assert report.fallback is None


@pytest.mark.parametrize("attach", [True, False])
def test_seconds_end_when_the_folder_is_written(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path, attach: bool
) -> None:
    serve(run, checkpoint, "m", coordinator)
    with api.pull("m", coordinator=coordinator, out=tmp_path / "out", attach=attach) as pull:
        ready_s = max(event.at_s for event in pull.layers())
        report = pull.wait(60)
        assert pull.progress().bytes_written == report.bytes
    assert any((tmp_path / "out").iterdir())
    assert report.seconds > ready_s  # all layers were ready before the folder was in its place


@pytest.mark.parametrize("options", [{}, {"attach": False}, {"transport": "tcp"}, {"hold": True}])
def test_writing_to_a_tensor_changes_no_other_process(
    run: Run, coordinator: str, checkpoint: Path, options: dict[str, object]
) -> None:
    serve(run, checkpoint, "m", coordinator)
    with (
        api.pull("m", coordinator=coordinator, **options) as one,  # type: ignore[arg-type]
        api.pull("m", coordinator=coordinator, **options) as other,  # type: ignore[arg-type]
    ):
        for tensor in one.state_dict().values():
            tensor.zero_()
        assert same(other.state_dict(), load_file(checkpoint))
    with api.pull("m", coordinator=coordinator) as again:
        assert same(again.state_dict(), load_file(checkpoint))


def test_layers_come_in_execution_order_by_every_form(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    expected = ["embed", *(f"model.layers.{n}" for n in range(8)), "head"]
    with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
        reported: list[str] = []
        pull.on_layer(lambda event: reported.append(event.name))
        names = []
        for event in pull.layers():
            names.append(event.name)
            tensors = pull.layer_state_dict(event.index)
            assert tensors
            assert sum(t.nbytes for t in tensors.values()) == event.nbytes
        assert names == expected
        assert sorted(reported) == sorted(expected)

    async def by_asyncio() -> list[str]:
        async with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
            found = [event.name async for event in pull]
            assert (await pull).layers == 10
            return found

    assert asyncio.run(by_asyncio()) == expected


def test_out_is_a_checkpoint_again(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    out = tmp_path / "out"
    report = run("pull", "m", "--coordinator", coordinator, "--out", str(out), "--json").json()
    assert report["model"] == "m"
    assert same(load_file(out / "model.safetensors"), load_file(checkpoint))
    assert (out / "model.safetensors").read_bytes() == checkpoint.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_held_pull_serves_when_the_origin_is_gone(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    origin = serve(run, checkpoint, "m", coordinator)
    relay = run("pull", "m", "--coordinator", coordinator, "--hold", "--json")
    relay.json()
    relay.until(lambda: len(api.list_sources("m", coordinator=coordinator)) == 2, "second source")
    origin.signal(signal.SIGKILL)
    origin.wait()
    for options in ({}, {"transport": "tcp"}):
        with api.pull("m", coordinator=coordinator, **options) as pull:  # type: ignore[arg-type]
            assert same(pull.state_dict(), load_file(checkpoint))
    relay.signal(signal.SIGTERM)
    assert relay.wait() == 0
    assert relay.process.pid not in [
        status.record.place.pid for status in api.list_sources("m", coordinator=coordinator)
    ]


def test_identity_pins(run: Run, coordinator: str, checkpoint: Path) -> None:
    identity = serve(run, checkpoint, "m", coordinator).json()["identity"]
    with api.pull(f"m@{identity[:12]}", coordinator=coordinator) as pull:
        assert pull.wait(30).identity == identity
    wrong = "0" * 12 if not identity.startswith("0") else "f" * 12
    with api.pull(f"m@{wrong}", coordinator=coordinator) as pull:
        assert isinstance(error_of(pull), UnknownModelError)


def test_a_peer_is_enough(run: Run, coordinator: str, checkpoint: Path) -> None:
    endpoint = serve(run, checkpoint, "m", coordinator).json()["endpoint"]
    none_opened = f"127.0.0.1:{free_port()}"
    with api.pull("m", peer=endpoint, coordinator=none_opened) as pull:
        assert same(pull.state_dict(), load_file(checkpoint))
    with api.pull("other", peer=endpoint, coordinator=none_opened) as pull:
        error = error_of(pull)
    assert isinstance(error, UnknownModelError)
    assert "nothing of that name" in str(error)


def test_serve_embeds_a_coordinator_where_none_answers(run: Run, checkpoint: Path) -> None:
    # As if it were the default: an address that was set is joined or refused, not made.
    address = f"127.0.0.1:{free_port()}"
    settings = replace(config.load(environ={"HOME": "/nonexistent"}), coordinator=address)
    with api.serve(checkpoint, model="m", settings=settings) as first:
        assert first.embedded
        with api.serve(checkpoint, model="m", settings=settings) as second:
            assert not second.embedded
            assert len(api.list_sources("m", coordinator=address)) == 2
        assert len(api.list_sources("m", coordinator=address)) == 1
        with api.pull("m", coordinator=address) as pull:
            assert pull.wait(30).layers == 10


def test_from_disk_and_fall_back(run: Run, coordinator: str, checkpoint: Path) -> None:
    with api.pull("m", path=checkpoint) as pull:
        report = pull.wait(30)
        assert report.fallback is None
        assert report.paths[0].transport == "disk"
        assert same(pull.state_dict(), load_file(checkpoint))
    with api.pull("m", fallback=checkpoint, coordinator=coordinator) as pull:
        report = pull.wait(30)
        assert report.fallback == "disk"
        assert same(pull.state_dict(), load_file(checkpoint))
    serve(run, checkpoint, "m", coordinator)
    with api.pull("m", fallback=checkpoint, coordinator=coordinator) as pull:
        assert pull.wait(30).fallback is None
    with pytest.raises(ConfigError, match="only one of"):
        api.pull("m", peer="127.0.0.1:1", path=checkpoint)


def test_state_dicts_and_modules_are_served_with_their_ties(coordinator: str) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(64, 16)
            self.head = torch.nn.Linear(16, 64, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.tensor(3.0))
            self.register_buffer("none", torch.empty(0, 4))

    module = Tied()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with api.serve(module, model="tied", coordinator=coordinator):
        module.embed.weight.data.zero_()  # a snapshot was taken
        for options in ({}, {"attach": False}, {"transport": "tcp"}):
            with api.pull("tied", coordinator=coordinator, **options) as pull:
                tensors = pull.state_dict()
            assert same(tensors, expected)
            assert tensors["embed.weight"].data_ptr() == tensors["head.weight"].data_ptr()
    with pytest.raises(ConfigError, match="cannot serve a list"):
        api.serve([1], model="m", coordinator=coordinator)


def test_revisions_and_variants_are_listed_apart(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "a", coordinator)
    serve(run, checkpoint, "a", coordinator, "--revision", "v2")
    serve(run, checkpoint, "a", coordinator, "--variant", "tp0of2")
    models = {str(m.model): m.sources for m in api.list_models(coordinator=coordinator)}
    assert models == {"a": 1, "a:v2": 1, "a[tp0of2]": 1}
    with api.pull("a", variant="tp0of2", coordinator=coordinator) as pull:
        assert pull.wait(30).model == "a[tp0of2]"
    with api.pull("a", revision="v2", coordinator=coordinator) as pull:
        assert pull.wait(30).model == "a:v2"
    listed = run("models", "--coordinator", coordinator, "--json").json()
    assert len(listed["models"]) == 3


def test_sigterm_drains(run: Run, coordinator: str, large_checkpoint: Path) -> None:
    source = serve(run, large_checkpoint, "m", coordinator, "--drain-grace-s", "60")
    with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
        next(pull.layers())
        source.signal(signal.SIGTERM)
        assert pull.wait(60).layers == 34
    assert source.wait() == 0
    assert api.list_sources("m", coordinator=coordinator) == []


def test_the_coordinator_restarts_and_knows_again(run: Run, checkpoint: Path) -> None:
    port = free_port()
    address, first = start_coordinator(run, port=port)
    serve(run, checkpoint, "m", address)
    first.signal(signal.SIGKILL)
    first.wait()
    _, second = start_coordinator(run, port=port)
    second.until(lambda: bool(api.list_sources("m", coordinator=address)), "source again", 20)
    with api.pull("m", coordinator=address) as pull:
        assert pull.wait(30).layers == 10


def test_into_fills_the_callers_memory(run: Run, coordinator: str, checkpoint: Path) -> None:
    serve(run, checkpoint, "m", coordinator)
    with api.pull("m", coordinator=coordinator) as pull:
        pull.wait(30)
        assert pull.manifest is not None
        nbytes = pull.manifest.layout.arena_nbytes
    room = bytearray(nbytes + 5)
    with api.pull("m", coordinator=coordinator, into=memoryview(room)) as pull:
        assert same(pull.state_dict(), load_file(checkpoint))
        assert pull.buffer().obj is room
    with api.pull("m", coordinator=coordinator, into=memoryview(bytearray(10))) as pull:
        assert isinstance(error_of(pull), ConfigError)


def test_closing_early_leaves_nothing(run: Run, coordinator: str, large_checkpoint: Path) -> None:
    serve(run, large_checkpoint, "m", coordinator)
    for transport, layers in itertools.product(("shm", "tcp"), (0, 1)):
        with api.pull("m", coordinator=coordinator, transport=transport, attach=False) as pull:
            for _ in range(layers):
                next(pull.layers())
    # The source is as good as before.
    with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
        assert json.dumps(pull.wait(30).to_json())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_memory_goes_with_the_last_who_refers_to_it(
    run: Run, coordinator: str, checkpoint: Path, transport: str
) -> None:
    """At once, not whenever the garbage collector comes by."""
    serve(run, checkpoint, "m", coordinator)
    gc.disable()
    try:
        with api.pull("m", coordinator=coordinator, transport=transport, attach=False) as pull:
            pull.wait(30)
            mapping = weakref.ref(pull.buffer().obj)
            tensors = pull.state_dict()
        kept = tensors.pop("model.norm.weight").clone(), tensors
        assert mapping() is not None
        tensors.clear()
        assert mapping() is None
        assert kept[0].nbytes
    finally:
        gc.enable()
