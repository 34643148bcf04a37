"""Pulls that fill a module's own tensors: from peers and from disk, reused, held, interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mx import api, config
from mx.errors import CheckpointError, ClosedError, ConfigError, IncompleteError, UnknownModelError
from mx.units import MIB
from tests.integration.lending import (
    Block,
    Net,
    equal,
    everything,
    lender,
    net,
    pointers,
    pss_bytes,
)
from tests.support.outcomes import error_of
from tests.support.tensors import same

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("torch_is_forked"),
]

UNUSABLE = "do not use it"


def untied(seed: int) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: row-major, in eight layers; 15 MB."""
    generator = torch.Generator().manual_seed(seed)
    found = {"model.embed_tokens.weight": torch.rand(700, 600, generator=generator)}
    for layer in range(6):
        found[f"model.layers.{layer}.mlp.weight"] = torch.rand(900, 600, generator=generator)
        found[f"model.layers.{layer}.mlp.bias"] = torch.rand(900, generator=generator)
    found["model.norm.weight"] = torch.rand(600, generator=generator)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_file(untied(1), path)
    return path


@pytest.fixture
def slow(coordinator: str, saved: Path) -> Iterator[str]:
    """Half a second for each layer over tcp."""
    small = replace(config.load(environ={"HOME": "/nonexistent"}))
    with api.serve(
        saved, model="m", coordinator=coordinator, max_bandwidth="4MB/s", settings=small
    ):
        yield coordinator


@pytest.mark.parametrize("transport", ["tcp", "shm", "ucx"])
def test_a_module_on_meta_gets_every_buffer(coordinator: str, transport: str) -> None:
    with torch.device("meta"):
        target = Net()
    with lender(coordinator, non_persistent_buffers=True):
        with pytest.raises(ConfigError, match="meta device") as caught:
            api.pull("m", coordinator=coordinator, into=target)
        assert "to_empty" in caught.value.hint
        target.to_empty(device="cpu")
        # As an engine builds it: with the strides that it computes with.
        for block in target.layers:
            assert isinstance(block, Block)
            block.turned = torch.nn.Parameter(torch.empty_like(block.turned.t()).t())
            block._buffers["cell"] = torch.empty(1)
        target.tie()
        where = pointers(target)
        if transport == "ucx":  # it refuses to expose what is lent: a copy is served
            with (
                api.pull("m", coordinator=coordinator, hold=True) as copy,
                copy.hold(),
                api.pull("m", coordinator=coordinator, into=target, transport="ucx") as pull,
            ):
                assert {path.transport for path in pull.wait(60).paths} == {"ucx"}
        else:
            with api.pull("m", coordinator=coordinator, into=target, transport=transport) as pull:
                assert {path.transport for path in pull.wait(60).paths} == {transport}
                layers = list(pull.layers())
                assert sum(layer.nbytes for layer in layers)
                found = {k: v for layer in layers for k, v in layer.tensors().items()}
                assert {k: v.data_ptr() for k, v in found.items()} == where
    assert pointers(target) == where
    assert equal(target, net(1))


@pytest.mark.parametrize("source", ["path", "fallback"])
@pytest.mark.parametrize("verify", ["chunks", "strong"])
def test_from_disk(coordinator: str, saved: Path, source: str, verify: str) -> None:
    target = untied(2)
    where = {name: tensor.data_ptr() for name, tensor in target.items()}
    before = pss_bytes()
    with api.pull(
        "m",
        coordinator=coordinator,
        into=target,
        verify=verify,
        path=saved if source == "path" else None,
        fallback=saved if source == "fallback" else None,
    ) as pull:
        pull.wait(60)
        assert pss_bytes() - before < 96 * MIB
        assert same(pull.state_dict(), untied(1))
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == where
    assert same(target, untied(1))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_out_beside_into_and_strong(
    coordinator: str, saved: Path, tmp_path: Path, transport: str
) -> None:
    target = untied(2)
    with (
        api.serve(saved, model="m", coordinator=coordinator),
        api.pull(
            "m",
            coordinator=coordinator,
            into=target,
            out=tmp_path / "out",
            verify="strong",
            transport=transport,
        ) as pull,
    ):
        assert pull.wait(60).verified == "strong"
    assert same(target, untied(1))
    assert same(load_file(tmp_path / "out" / "model.safetensors"), target)


def test_lent_tensors_are_written_row_major_with_their_empty_ones(
    coordinator: str, tmp_path: Path
) -> None:
    target, out = net(2), tmp_path / "out"
    with (
        lender(coordinator),
        api.pull("m", coordinator=coordinator, into=target, out=out, verify="strong") as pull,
    ):
        pull.wait(60)
    found = load_file(out / "model.safetensors")
    expected = everything(net(1))
    assert found and all(torch.equal(found[name], expected[name]) for name in found)
    assert any(name.endswith("none") for name in found)


def test_a_pull_that_was_cut_off_resumes_into_the_same_tensors(
    slow: str, saved: Path, tmp_path: Path
) -> None:
    target, out = untied(2), tmp_path / "out"
    pull = api.pull("m", coordinator=slow, into=target, out=out, transport="tcp")
    layers = pull.layers()
    for _ in range(3):
        next(layers)
    pull.close()
    with pytest.raises(ClosedError) as caught:
        pull.wait(0)
    assert UNUSABLE in caught.value.hint and "go on from" in caught.value.hint
    for tensor in target.values():
        tensor.zero_()
    with api.pull("m", coordinator=slow, into=target, out=out, transport="tcp") as again:
        paths = {path.transport: path.bytes for path in again.wait(60).paths}
    assert paths["resume"] > 0
    assert same(target, untied(1))
    assert same(load_file(out / "model.safetensors"), target)


def test_memory_in_place_reuses_and_is_reused(coordinator: str, saved: Path) -> None:
    first, second, third, fourth = (untied(seed) for seed in (2, 3, 4, 5))
    base = untied(1)
    with (
        api.serve(base, model="m", coordinator=coordinator, copy=False) as source,
        api.pull("m", coordinator=coordinator, attach=False) as copied,
        api.pull("m", coordinator=coordinator, into=first, reuse=copied, transport="tcp") as one,
        api.pull("m", coordinator=coordinator, into=second, reuse=one, transport="tcp") as two,
        api.pull("m", coordinator=coordinator, into=third, reuse=source, transport="tcp") as three,
    ):
        for pull in (one, two, three):
            assert {path.transport for path in pull.wait(60).paths} == {"reuse"}
        first["model.layers.2.mlp.weight"][:] = (
            0.5  # what is written to is found out, and transferred
        )
        with api.pull(
            "m", coordinator=coordinator, into=fourth, reuse=one, transport="tcp"
        ) as four:
            paths = {path.transport: path.bytes for path in four.wait(60).paths}
            assert paths["tcp"] and paths["reuse"]
        one.release()
        with pytest.raises(ClosedError, match="given back"):
            api.pull("m", coordinator=coordinator, reuse=one)
    assert all(same(each, base) for each in (second, third, fourth))
    with pytest.raises(ClosedError):
        api.pull("m", coordinator=coordinator, reuse=source)


def test_what_is_held_is_given_to_a_third_and_then_given_back(coordinator: str) -> None:
    target, third = net(2), net(3)
    with lender(coordinator, non_persistent_buffers=True) as source:
        pull = api.pull("m", coordinator=coordinator, into=target, hold=True, transport="tcp")
        held = pull.hold()
        assert pull.hold() is held
        source.end()
    with pull:
        with lender(coordinator, seed=5, pull="m") as relay:  # into a module of its own, from here
            assert relay.said["key"] == str(pull.model)
        with api.pull("m", peer=held.endpoint, into=third, transport="shm") as other:
            other.wait(60)
        assert equal(third, net(1))
        with pytest.raises(ConfigError, match="in use"):
            api.serve(target, model="n", coordinator=coordinator, copy=False)
        pull.release()
        pull.release()
        with pytest.raises(ClosedError, match="given back"):
            pull.hold()
        assert pull.state_dict()["embed.weight"].data_ptr() == target.embed.weight.data_ptr()
        with torch.no_grad():
            target.embed.weight.add_(1)
        with (
            api.serve(target, model="n", coordinator=coordinator, copy=False),
            api.pull("n", coordinator=coordinator, into=third) as again,
        ):
            again.wait(60)
            assert torch.equal(third.embed.weight, target.embed.weight)


def test_it_gives_to_others_while_it_receives(coordinator: str, saved: Path) -> None:
    """Of an origin that is slow two pulls get each chunk once, and the rest from one another."""
    small = replace(config.load(environ={"HOME": "/nonexistent"}))
    one, two = untied(2), untied(3)
    small = replace(small, coordinated_reading="always")
    with api.serve(
        saved, model="m", coordinator=coordinator, max_bandwidth="3MB/s", settings=small
    ) as source:
        options: dict[str, Any] = {"coordinator": coordinator, "settings": small}
        with (
            api.pull("m", into=one, transport="tcp", **options) as first,
            api.pull("m", into=two, transport="tcp", **options) as second,
        ):
            reports = [pull.wait(90) for pull in (first, second)]
        peers = {path.source for report in reports for path in report.paths}
        assert peers - {source.endpoint}
    assert same(one, untied(1)) and same(two, untied(1))


def test_two_pulls_into_one_module(slow: str) -> None:
    target = untied(2)
    with api.pull("m", coordinator=slow, into=target, transport="tcp") as first:
        next(first.layers())
        with api.pull("m", coordinator=slow, into={**target}) as second:
            error = error_of(second)
        assert isinstance(error, ConfigError)
        assert "another pull or broadcast fills it" in error.message and "close" in error.hint
        assert UNUSABLE not in error.hint
        first.wait(60)
    assert same(target, untied(1))
    with api.pull("m", coordinator=slow, into=target, transport="shm") as third:
        third.wait(60)


def test_nothing_is_said_of_tensors_that_nothing_was_written_to(
    coordinator: str, saved: Path
) -> None:
    target = untied(2)
    target["model.norm.weight"] = torch.zeros(7)
    before = {name: tensor.clone() for name, tensor in target.items()}
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"path": saved}, ConfigError),
        ({"path": saved.parent / "absent"}, ConfigError),
        ({"coordinator": coordinator}, UnknownModelError),
    ]
    for arguments, kind in cases:
        with api.pull("m", into=target, **arguments) as pull:
            error = error_of(pull)
        assert isinstance(error, kind)
        assert UNUSABLE not in error.hint
    assert same(target, before)


def test_disk_that_fails_halfway_or_is_not_what_was_pinned(
    coordinator: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api.pull(f"m@{'0' * 64}", path=saved, into=untied(2)) as pull:
        error = error_of(pull)
    assert isinstance(error, CheckpointError) and UNUSABLE in error.hint
    file = Path(shutil.copy(saved, tmp_path / "model.safetensors"))
    real, calls = os.preadv, [0]

    def shrinking(fd: int, views: object, offset: int) -> int:
        calls[0] += 1
        return 0 if calls[0] > 1 else real(fd, views, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", shrinking)
    with api.pull("m", path=file, into=untied(2)) as pull:
        error = error_of(pull)
    assert isinstance(error, CheckpointError) and UNUSABLE in error.hint


def test_a_pull_that_fails_says_that_its_tensors_are_not_to_be_used(
    coordinator: str, saved: Path
) -> None:
    target = untied(2)
    small = replace(config.load(environ={"HOME": "/nonexistent"}), stall_timeout_s=1.0)
    source = api.serve(
        saved, model="m", coordinator=coordinator, max_bandwidth="2MB/s", settings=small
    )
    with (
        source,
        api.pull(
            "m", coordinator=coordinator, into=target, transport="tcp", settings=small
        ) as pull,
    ):
        next(pull.layers())
        source.close()
        error = error_of(pull, 60)
        assert isinstance(error, IncompleteError) and UNUSABLE in error.hint
    # The tensors are free, and another pull makes them whole.
    with api.pull("m", path=saved, into=target) as again:
        again.wait(60)
    assert same(target, untied(1))


def test_interrupted_twice(slow: str) -> None:
    target = untied(2)
    interrupts = []

    def interrupt(after_s: float) -> None:
        interrupts.append(threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)))
        interrupts[-1].start()

    try:
        with (
            pytest.raises(KeyboardInterrupt),
            api.pull("m", coordinator=slow, into=target, transport="tcp") as pull,
        ):
            next(pull.layers())
            try:
                interrupt(0.1)
                pull.wait(60)
            finally:
                interrupt(0.1)
                pull.wait(60)
    finally:
        for each in interrupts:
            each.join()
    with pytest.raises(ClosedError) as caught:
        pull.wait(0)
    assert UNUSABLE in caught.value.hint
    with api.pull("m", coordinator=slow, into=target, transport="shm") as again:
        again.wait(60)
    assert same(target, untied(1))
