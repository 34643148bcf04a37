"""A model whose parameters are sharded by FSDP2 over processes is served as one, and followed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mx
from mx.errors import MxError
from tests.support.kv_blocks import until
from tests.support.trainer import Ranks, ranks

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trainer() -> Iterator[Ranks]:
    """Three ranks, for tests that leave them running."""
    with ranks(3) as found:
        yield found


@pytest.fixture
def three(trainer: Ranks) -> Iterator[Ranks]:
    yield trainer
    trainer.ask("rank.close()")


@pytest.fixture
def mortal() -> Iterator[Ranks]:
    with ranks(3) as found:
        yield found


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_shards_are_one_model(three: Ranks, coordinator: str, tmp_path: Path) -> None:
    three.ask(f"rank.whole({str(tmp_path / 'whole.safetensors')!r})")
    checkpoint = load_file(tmp_path / "whole.safetensors")
    assert three.ask(f"rank.serve('policy', {coordinator!r}, wait_s=60)") == [
        "policy",
        "policy[part=1/3]",
        "policy[part=2/3]",
    ]
    with mx.pull("policy", coordinator=coordinator) as pull:
        report = pull.wait()
        assert same(pull.state_dict(), checkpoint)
        assert [(each.transport, each.bytes) for each in report.paths] == [
            ("parts", sum(each.nbytes for each in checkpoint.values()))
        ]
        manifest = pull.wait_manifest()
    # The identity is the checkpoint's.
    with mx.serve(tmp_path / "whole.safetensors", model="file", coordinator=coordinator) as file:
        assert file.manifest.ref.identity == manifest.ref.identity
    pin = manifest.ref.identity.hex()
    into = {name: torch.zeros_like(each) for name, each in checkpoint.items()}
    with mx.pull(f"policy@{pin}", coordinator=coordinator, into=into, verify="strong") as pull:
        pull.wait()
    assert same(into, checkpoint)
    # A reader's own slice, too.
    sliced = mx.load("policy", coordinator=coordinator, slices={"0.weight": mx.Shard(1, 1, 2)})
    assert torch.equal(sliced["0.weight"], checkpoint["0.weight"][:, 500:])

    # What a part is is listed, and can be read as any model.
    part = mx.load("policy", variant="part=1/3", coordinator=coordinator)
    assert all(re.fullmatch(r"[\w.]+#\d+", name) for name in part)
    whole_nbytes = sum(each.nbytes for each in checkpoint.values())
    assert sum(each.nbytes for each in part.values()) < whole_nbytes / 2
    with pytest.raises(MxError, match="does not serve over it"):  # it leads to each part
        mx.load("policy", coordinator=coordinator, transport="tcp")
    assert three.ask("rank.close()") == [None] * 3
    with pytest.raises(MxError):
        mx.load("policy", coordinator=coordinator)


def test_readers_get_one_step_or_the_other(three: Ranks, coordinator: str) -> None:
    three.ask(f"rank.serve('policy', {coordinator!r}, wait_s=60)")
    three.ask("rank.step(1)")
    over, found = threading.Event(), set[float]()

    def read() -> None:
        while not over.is_set():
            try:
                weights = mx.load("policy", coordinator=coordinator, wait_s=20)
            except MxError:  # late: the trainer changes it while it is read
                continue
            steps = {
                float(value) - number / 8
                for number, name in enumerate(
                    ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
                )
                for value in set(weights[name].flatten().tolist())
            }
            assert len(steps) == 1, steps
            found.update(steps)

    failures: list[BaseException] = []

    def watched() -> None:
        try:
            read()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failures.append(error)

    readers = [threading.Thread(target=watched) for _ in range(2)]
    for each in readers:
        each.start()
    steps = 8
    for step in range(2, steps):
        number = f"policy:main.{step + 1}"
        assert three.ask(f"rank.step({step})") == [
            number,
            f"{number}[part=1/3]",
            f"{number}[part=2/3]",
        ]
        if step % 2:  # else the next one comes while readers still look for this one
            until(partial(lambda step: step in found or failures, step))
    over.set()
    for each in readers:
        each.join()
    assert not failures, failures
    assert {3, 5, 7} <= found <= set(range(1, steps))
    last = mx.load("policy", coordinator=coordinator, wait_s=20)
    assert set(last["0.bias"].tolist()) == {steps - 1 + 1 / 8}


def test_a_step_that_fails_changes_nothing(three: Ranks, coordinator: str) -> None:
    three.ask(f"rank.serve('policy', {coordinator!r}, wait_s=60)")
    three.ask("rank.step(1)")
    before = mx.load("policy", coordinator=coordinator)
    assert three.ask("rank.step(2, fails=True)") == ["in the block"] * 3
    assert same(mx.load("policy", coordinator=coordinator, wait_s=20), before)
    three.ask("rank.step(3)")
    after = mx.load("policy", coordinator=coordinator, wait_s=20)
    assert set(after["0.bias"].tolist()) == {3 + 1 / 8}


def test_a_rank_that_is_missing_is_named(mortal: Ranks, coordinator: str) -> None:
    (said,) = mortal.ask(f"rank.serve('policy', {coordinator!r}, wait_s=0.5)", 0)
    assert said.startswith("NoSourceError: policy:main lacks part=1/3, part=2/3")
    mortal.ask(f"rank.serve('policy', {coordinator!r}, wait_s=60)")
    # A rank dies in a step: the others' is not listed, and readers get nothing half done.
    mortal.kill(2)
    mortal.ask("setattr(rank.source.composer, 'wait_s', 3)", 0)
    mortal.tell("rank.step(1)", 0, 1)
    # The part is listed until its lease has run out, so that it is asked, or no more there.
    first, second = mortal.answers(0, 1)
    assert second == "policy:main.2[part=1/3]"
    assert first.startswith("NoSourceError: policy:main.2 lacks part=2/3")
    assert mortal.ask("rank.source.withdrawn != ''", 0) == [True]
    with pytest.raises(MxError):
        mx.load("policy", coordinator=coordinator)


def test_a_rank_that_dies_while_it_is_read(mortal: Ranks, coordinator: str) -> None:
    mortal.ask(f"rank.serve('policy', {coordinator!r}, wait_s=60, max_bandwidth='2MB/s')")
    with mx.pull("policy", coordinator=coordinator) as pull:
        pull.wait_manifest()
        mortal.kill(1)
        with pytest.raises(MxError):
            pull.wait()


def test_shards_over_meshes(coordinator: str) -> None:
    with ranks(4) as four:
        shapes, *_ = four.ask(f"rank.meshes('meshes', {coordinator!r})")
        found = mx.load("meshes", coordinator=coordinator)
        assert torch.equal(found.pop("plain"), torch.arange(9.0))
        assert torch.equal(found.pop("tied"), found["both.0"])
        assert len(found) == len(shapes) - 2
        for number, each in enumerate(found[name] for name in sorted(found, key=_made_at)):
            values = torch.arange(each.numel(), dtype=torch.float32).reshape(each.shape)
            assert torch.equal(each, values + number + 1)


def _made_at(name: str) -> tuple[int, str]:
    kind, _, number = name.partition(".")
    return ["both", "outer", "inner", "copied"].index(kind), number


def test_other_shards_are_refused() -> None:
    refused = {
        "columns": "w is sharded as",
        "sums": "w holds partial sums",
        "copy": "which are lent where they are",
        "variant": "leave out `variant`",
    }
    with ranks(2) as two:
        for kind, said in refused.items():
            for found in two.ask(f"rank.refused({kind!r})"):
                assert found.startswith("ConfigError: ")
                assert said in found
