"""Kinds of models and of engines, each from a checkpoint's source and from another replica.

What each generates is, to the last logprob, what it generates after vLLM's ordinary loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from tests.vllm.checkpoints import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_END,
    bare,
    tokenizer,
    write_adapter,
    write_audio,
    write_checkpoint,
    write_fp8,
    write_mixture,
)
from tests.vllm.hosts import EngineError, Host, host, lending, same, start

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


@pytest.fixture(scope="module")
def hosts(coordinator: str, place: Path) -> Iterator[tuple[Host, Host]]:
    with host(coordinator, place / "a.log") as a, host(coordinator, place / "b.log") as b:
        yield a, b


def by_each_way(
    hosts: tuple[Host, Host], coordinator: str, checkpoint: Path, name: str, **options: Any
) -> dict[str, Any]:
    """Start an engine by the ordinary loader, from a source of its checkpoint, and from a replica
    with the source gone. Return what the first holds and generates; the others run."""
    a, b = hosts
    options = {"skip_tokenizer_init": False, **options}
    # The replicas begin where nothing that could be loaded is on disk.
    b.begin("start", str(checkpoint), load_format="auto", **options)
    with mx.serve(checkpoint, model=name, coordinator=coordinator):
        one = start(a, bare(checkpoint), name, **options)
        assert lending(a)["loads"] == {"checkpoint": 1}, a.said()[-3000:]
    reference: dict[str, Any] = b.end()
    two = start(b, bare(checkpoint), name, **options)
    assert lending(b)["loads"] == {"loaded": 1}, b.said()[-3000:]
    assert same(one, reference) and same(two, reference)
    return reference


@pytest.fixture(scope="module")
def worded(place: Path) -> Path:
    """A small Llama with a tokenizer."""
    folder = write_checkpoint(place / "worded", seed=1)
    tokenizer().save_pretrained(folder)
    return folder


def test_a_mixture_of_experts(hosts: tuple[Host, Host], coordinator: str, place: Path) -> None:
    folder = write_mixture(place / "mixture", seed=2)
    tokenizer().save_pretrained(folder)
    by_each_way(hosts, coordinator, folder, "mixture")


@pytest.mark.slow
def test_an_embedding_model_and_a_generating_one_of_one_name(
    hosts: tuple[Host, Host], coordinator: str, worded: Path
) -> None:
    """Neither takes the other's state; both take the checkpoint's."""
    a, b = hosts
    pooling = {"runner": "pooling", "convert": "embed"}
    reference = by_each_way(hosts, coordinator, worded, "embeds", **pooling)
    assert len(reference["generated"]) == 128
    assert "runner=pooling" in a.status()["variant"]
    with pytest.raises(EngineError, match=r"^ConfigError: .*runner: pooling listed, none here"):
        start(b, bare(worded), "embeds", skip_tokenizer_init=False, extra={"fallback": False})
    with mx.serve(worded, model="embeds", coordinator=coordinator):
        made = start(b, bare(worded), "embeds", skip_tokenizer_init=False)
        assert b.status()["loads"] == {"checkpoint": 1} and b.status()["refused"] == 1
    assert len(made["generated"]) == 64


@pytest.mark.slow
def test_a_multimodal_model(hosts: tuple[Host, Host], coordinator: str, place: Path) -> None:
    """One whose prompts may have no sound holds fewer tensors: its state is another."""
    a, b = hosts
    folder = write_audio(place / "audio", seed=3)
    options: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": 1024}
    reference = by_each_way(hosts, coordinator, folder, "audio", **options)
    heard = f"{AUDIO_BEGIN} {AUDIO} {AUDIO_END} w20 w30"
    assert a.do("generate", audio=heard) == b.do("generate", audio=heard)
    deaf = start(b, folder, "audio", limit_mm_per_prompt={"audio": 0}, **options)
    assert b.status()["loads"] == {"ordinary": 1} and "multimodal: " in b.said()
    assert set(deaf["tensors"]) < set(reference["tensors"])
    assert deaf["generated"] == reference["generated"]


@pytest.mark.slow
def test_an_adapter_and_a_draft_model(
    hosts: tuple[Host, Host], coordinator: str, worded: Path, place: Path
) -> None:
    """The adapter is pulled from a peer; the draft model is left to the ordinary loader."""
    a, b = hosts
    draft = write_checkpoint(place / "draft", seed=5, num_hidden_layers=1)
    tokenizer().save_pretrained(draft)
    adapter, pulled = write_adapter(place / "adapter", seed=6), place / "pulled"
    with (
        mx.serve(adapter, model="adapter", coordinator=coordinator),
        mx.pull("adapter", coordinator=coordinator, out=pulled) as pull,
    ):
        pull.wait()
    options: dict[str, Any] = {"skip_tokenizer_init": False}
    lora = {"enable_lora": True, "max_lora_rank": 8, **options}
    one = start(a, worded, "adapted", **lora)
    with_it = a.do("generate", adapter=str(adapter))
    lending(a)
    two = start(b, bare(worded), "adapted", **lora)
    assert b.status()["loads"] == {"loaded": 1}
    assert one["generated"] == two["generated"] != with_it
    assert b.do("generate", adapter=str(pulled)) == with_it

    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    drafted = start(b, bare(worded), "adapted", speculative_config=drafts, **options)
    assert b.status()["loads"] == {"loaded": 1}
    assert [token for token, _ in drafted["generated"]] == [t for t, _ in one["generated"]]


def test_weights_of_eight_bits(hosts: tuple[Host, Host], coordinator: str, place: Path) -> None:
    """vLLM for CPUs has no kernels to process them, so that the engine ends; until then it holds
    what it holds after the ordinary loader, and what it lent meanwhile is not listed any more."""
    a, b = hosts
    folder, failed = write_fp8(place / "fp8", seed=7), "scaled_fp8_quant"
    with pytest.raises(EngineError, match=failed):
        b.do("start", str(folder), load_format="auto")
    with mx.serve(folder, model="fp8", coordinator=coordinator):
        with pytest.raises(EngineError, match=failed):
            start(a, bare(folder), "fp8")
        assert not [
            each
            for each in mx.list_sources("fp8", coordinator=coordinator)
            if "state=loaded" in each.record.model.variant
        ]
    before = a.do("last_before")
    assert before == b.do("last_before") and "float8_e4m3fn" in str(before)
