"""vLLM's real loader classes on a platform that says that it is CUDA's: states are lent and taken.

Only the platform is a fake: it names a GPU, and tensors are a CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import ended, python
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import (
    SLOW_REPLICA,
    Host,
    host,
    killed_in_mid_load,
    lending,
    start,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


@pytest.fixture(scope="module")
def hosts(coordinator: str, place: Path) -> Iterator[tuple[Host, Host]]:
    with host(coordinator, place / "a.log") as a, host(coordinator, place / "b.log") as b:
        yield a, b


@pytest.mark.slow
def test_processed_state_goes_from_gpu_to_gpu(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str
) -> None:
    a, b = hosts
    one = start(a, checkpoint, "g", gpu=True)
    status = lending(a)
    assert status["lending"] == "lending", a.said()
    assert "device=cuda-9.0" in status["variant"] and "state=processed" in status["variant"]
    two = start(b, bare(checkpoint), "g", gpu=True)
    assert lending(b)["loads"] == {"processed": 1}
    assert (two["tensors"], two["generated"]) == (one["tensors"], one["generated"])

    # The source of the processed state is killed while it gives it: the model is the ordinary
    # loader's, to the last logprob, and nothing of the one that was built on meta is left.
    reference = b.do("start", str(checkpoint), load_format="auto", gpu=True)
    with ended(python(SLOW_REPLICA, "g", status["variant"], coordinator)) as source:
        after = killed_in_mid_load(b, source, checkpoint, "g-slow", coordinator, gpu=True)
    assert after["tensors"] == reference["tensors"]
    assert after["generated"] == reference["generated"]
    assert b.status()["loads"] == {"ordinary": 1}
    assert "vLLM's ordinary loader takes over" in b.said()


@pytest.mark.slow
def test_tensors_of_the_models_module(
    hosts: tuple[Host, Host], coordinator: str, place: Path
) -> None:
    """The module of the model's class is first imported while a model is built on meta: the
    ordinary loader, and the processed state, compute with the tensors that it makes."""
    a, b = hosts
    folder = write_checkpoint(place / "tensor", seed=21, architectures=["LlamaWithTensor"])
    reference = a.do("start", str(folder), load_format="auto", gpu=True)
    start(a, folder, "tensor", gpu=True)
    status = lending(a)
    with ended(python(SLOW_REPLICA, "tensor", status["variant"], coordinator)) as source:
        after = killed_in_mid_load(b, source, folder, "tensor-slow", coordinator, gpu=True)
    assert b.status()["loads"] == {"ordinary": 1}
    assert after["generated"] == reference["generated"]
    two = start(b, bare(folder), "tensor", gpu=True)
    assert b.status()["loads"] == {"processed": 1}
    assert two["generated"] == reference["generated"]


def test_a_version_that_lacks_what_a_lender_asks_for(
    hosts: tuple[Host, Host], checkpoint: Path
) -> None:
    """The engine starts as ever, and the state is lent that can be."""
    b = hosts[1]
    b.do("lack")
    start(b, checkpoint, "lack", gpu=True)
    status = lending(b)
    assert (status["loads"], status["lending"]) == ({"ordinary": 1}, "lending")
    assert "state=loaded" in status["variant"]
